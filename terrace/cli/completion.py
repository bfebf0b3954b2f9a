"""`terrace completion SHELL`: completion of commands and options for bash, zsh and fish.

Words come from the argument parsers and from the keys of `terrace keys`, so a regenerated script knows every option.
"""

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from terrace.base.errors import ConfigError

SHELLS = ("bash", "zsh", "fish")


@dataclass(frozen=True)
class Words:
    """Words that may follow a command: names of its actions, options with their help, and option values."""

    actions: Mapping[str, str]  # name -> help
    options: Mapping[str, str]  # every option string -> help
    choices: Mapping[str, tuple[str, ...]]  # option string -> its values


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "completion",
        description="Print a script that completes commands and options in a shell. For bash: "
        'eval "$(terrace completion bash)" in ~/.bashrc; for zsh the same in ~/.zshrc, after compinit; for fish: '
        "terrace completion fish | source in ~/.config/fish/config.fish.",
    )
    parser.add_argument("shell", choices=SHELLS, metavar="SHELL", help=", ".join(SHELLS))
    parser.set_defaults(run=run)


def run(options: argparse.Namespace, rest: Sequence[str]) -> int:
    """Prints the script; returns 0."""
    if rest:
        raise ConfigError(f"unknown argument {rest[0]!r}; see terrace completion --help")
    print({"bash": bash, "zsh": zsh, "fish": fish}[options.shell](all_words()), end="")
    return 0


def all_words() -> dict[tuple[str, ...], Words]:
    """The words of the whole command line; each key is the sequence of words typed before them."""
    # Imported here: the module imports this one.
    from terrace.cli.keys import dotted, sections, takers
    from terrace.cli.main import all_help, whole_parser

    found = dict(words_of(whole_parser(), ()))
    found[()] = replace(found[()], actions=all_help())
    found["keys",] = replace(found["keys",], actions=dict.fromkeys(sections(), "") | dotted())
    for command in (*takers(), "explain"):
        keys = {f"--{name}": _line(line) for name, line in dotted(command).items()}
        found[command,] = replace(found[command,], options={**found[command,].options, **keys})
    return found


def words_of(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Words]]:
    """The words of `parser`, reached by typing `path`, and of its subparsers."""
    actions: dict[str, str] = {}
    options: dict[str, str] = {}
    choices: dict[str, tuple[str, ...]] = {}
    inner: Mapping[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            inner = action.choices
            helps = {each.dest: each.help for each in action._choices_actions}
            actions |= {name: _line(helps.get(name) or each.description) for name, each in inner.items()}
        elif action.option_strings:
            options |= dict.fromkeys(action.option_strings, _line(action.help))
            if action.choices:
                choices |= dict.fromkeys(action.option_strings, tuple(map(str, action.choices)))
        elif action.choices:
            actions |= dict.fromkeys(map(str, action.choices), "")
    yield path, Words(actions, options, choices)
    for name, each in inner.items():
        yield from words_of(each, (*path, name))


def bash(found: Mapping[tuple[str, ...], Words]) -> str:
    """A completion function for bash; completes file names if no word fits."""
    lines = ["_terrace() {", '    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" path=""']
    lines += [
        "    local at",
        '    for at in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
        '        case "$path $at" in',
        f'            {"|".join(_quoted_path(path) for path in found if path)}) path="$path $at" ;;',
        "        esac",
        "    done",
        '    local words=""',
        '    case "$path $before" in',
    ]
    for path, words in found.items():
        for option, values in words.choices.items():
            lines.append(f"        {quote(_spoken(path) + ' ' + option)}) words={quote(' '.join(values))} ;;")
    lines += ['        *) case "$path" in']
    for path, words in found.items():
        lines.append(
            f"            {quote(_spoken(path))}) words={quote(' '.join((*words.actions, *words.options)))} ;;"
        )
    lines += [
        "        esac ;;",
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$word"))',
        "}",
        "complete -o default -F _terrace terrace",
        "",
    ]
    return "\n".join(lines)


def zsh(found: Mapping[tuple[str, ...], Words]) -> str:
    """The bash function, run by zsh's own bash emulation."""
    return "autoload -U +X bashcompinit && bashcompinit\n" + bash(found)


def fish(found: Mapping[tuple[str, ...], Words]) -> str:
    """One `complete` line per word, for fish."""
    lines = []
    for path, words in found.items():
        inner = [*words.actions] if any((*path, name) in found for name in words.actions) else []
        tests = [f"__fish_seen_subcommand_from {name}" for name in path]
        tests += [f"not __fish_seen_subcommand_from {' '.join(inner)}"] * bool(inner)
        where = f" -n {quote('; and '.join(tests))}" if tests else ""
        # A word of a command is no file; a command without words may take one.
        for name, said in words.actions.items():
            lines.append(f"complete -c terrace -f{where} -a {quote(name)} -d {quote(said)}")
        for option, said in words.options.items():
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            values = f" -x -a {quote(' '.join(words.choices[option]))}" if option in words.choices else ""
            lines.append(f"complete -c terrace{where} {flag}{values} -d {quote(said)}")
    return "\n".join([*lines, ""])


def _line(text: str | None) -> str:
    # The first clause: the rest is for --help.
    return re.split(r"[;.](?: |$)| \(", " ".join((text or "").split()).replace("%%", "%"), maxsplit=1)[0].strip()


def _spoken(path: tuple[str, ...]) -> str:
    return "".join(f" {name}" for name in path)


def _quoted_path(path: tuple[str, ...]) -> str:
    return quote(_spoken(path))
