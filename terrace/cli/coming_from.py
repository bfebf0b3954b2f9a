"""Refuses options that `terrace.base.coming_from` lists, each with a line of Terrace that can be pasted."""

import argparse
import shlex
from collections.abc import Iterator, Sequence
from itertools import pairwise

from terrace.base.coming_from import PLANS, RUN, options_for, preset_for, sections
from terrace.base.errors import ConfigError

_OF_RUNS = ("train", "simulate", "doctor", "data prepare")  # commands with the sections of terrace train
# Commands with keys that refuse those of others by words of their own.
_OWN_WORDS = ("plan", "probe", "data lengths", "rehearse run")
_ELSEWHERE = ("train", "rl", "generate")  # commands that are suggested for an option that a command has not
_OFF = ("false", "no", "off")  # values of a switch; 0 is a stage of ZeRO


def check_names(words: Sequence[str], parser: argparse.ArgumentParser) -> None:
    """Raises `ConfigError` for the options of a command line that have other names here, with all of ours in one line.

    `parser` is the whole parser with the subparser of the command. Keys of sections that the command has are left to
    the reader of these sections.
    """
    command, own = command_of(words, parser)
    if command == "keys":  # which looks such words up
        return
    names = _names(own)
    takes_run = any(action.metavar in (RUN, "FOLDER") for action in own._actions if not action.option_strings)
    unknown, ours = list[str](), list[str]()
    for (before, word), after in zip(pairwise(words), [*words[2:], ""], strict=True):
        name, equals, value = word.partition("=")
        if not name.startswith("--") or name in names or before in _with_text(own) or _is_read_later(name, command):
            continue
        value = value if equals else "" if after.startswith("--") else after
        if answer := _answer(name, value, command, names, takes_run=takes_run):
            unknown.append(repr(name))
            ours.append(answer)
    if unknown:
        raise ConfigError(
            f"unknown argument{'s' * (len(unknown) > 1)} {', '.join(unknown)}; did you mean {' '.join(ours)}?"
        )


def _answer(name: str, value: str, command: str, names: set[str], *, takes_run: bool) -> str:
    """Our option for the option `name` of another trainer, with its value; "" for a word that the table has not."""
    found = list(_own_options(name))
    for each in found:
        if each == name:  # of another command
            continue
        if each == RUN and takes_run:
            raise ConfigError(f"unknown argument {name!r}; the folder is the first word: terrace {command} {RUN}")
        if each != RUN and _takes(each, command, names):
            return _pasted(name, each, value)
    if "." not in name or command not in _OWN_WORDS:
        _refuse_elsewhere(name, command, found, value)
    return ""


def command_of(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[str, argparse.ArgumentParser]:
    """The name of the command and its own parser; `data prepare` has two words."""
    name = ""
    for word in words:
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if not inner or word not in inner[0].choices:
            break
        name, parser = f"{name} {word}".strip(), inner[0].choices[word]
    return name, parser


def _names(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings}


def _with_text(parser: argparse.ArgumentParser) -> set[str]:
    # A value of these options may be any text.
    return {name for action in parser._actions if action.metavar == "TEXT" for name in action.option_strings}


def _is_read_later(name: str, command: str) -> bool:
    section = name.removeprefix("--").partition(".")[0]
    if "." not in name or section not in sections():
        return False
    return command in _OF_RUNS or (command == "rl" and section not in ("train", "data", "lora"))


def _own_options(name: str) -> Iterator[str]:
    # Other trainers write - or _; options have -.
    if "." not in name and "_" in name:
        yield name.replace("_", "-")
    yield from options_for(name)


def _takes(option: str, command: str, names: set[str]) -> bool:
    word = option.partition(" ")[0]
    return word in names or _is_key(word, command)


def _pasted(name: str, option: str, value: str) -> str:
    """The option with the user's value, unless the table has one. Raises `ConfigError` for a switch that is off."""
    word, space, own = option.partition(" ")
    if not space:
        return f"{option} {shlex.quote(value)}" if value and value.lower() not in ("true", "false") else option
    if value.lower() in _OFF:
        if own == "true":
            return f"{word} false"
        raise ConfigError(f"unknown argument {name!r}; it is off, so leave it out ({option} where it is on)")
    if word == "--plan":  # the value may be the plan's name, as of --fsdp, or a part of it
        own = own.format(value or 3)
        return f"{word} {next(filter(None, (preset_for(each, PLANS) for each in (*value.split()[:1], own))), own)}"
    return option


def _refuse_elsewhere(name: str, command: str, found: Sequence[str], value: str) -> None:
    # A name of the table in a command that has nothing like it, as epochs in one that plans a step.
    from terrace.cli.main import parser_of

    for other in _ELSEWHERE if found else ():
        names = _names(command_of([other], parser_of([other]))[1])
        for each in found:
            if other != command and each != RUN and _takes(each, other, names):
                raise ConfigError(
                    f"unknown argument {name!r}; terrace {other} has it: terrace {other} {_pasted(name, each, value)}"
                )


def _is_key(name: str, command: str) -> bool:
    section, dot, key = name.removeprefix("--").partition(".")
    if not dot:
        return False
    if command == "plan":  # the keys of the plan that is compared, of the cluster and of the model
        return section in ("plan", "cluster", "model")
    # For an error alone: to know the keys takes a moment.
    from terrace.cli.keys import dotted, takers

    command = "train" if command == "data prepare" else command
    if section == "model":  # whose keys are those of the family
        return command in takers()
    return command in takers() and f"{section}.{key.partition('.')[0]}" in dotted(command)
