"""An option has the same name in all commands, and a name the same meaning; other names are translated."""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator

import pytest

from terrace.cli.aliases import _OF_A_RUN, _OPTIONS, _RUN
from terrace.cli.main import whole_parser

# Name of an option -> a pattern that its help matches in every command, and the help of no other option.
MEANINGS = {
    "--adapter": r"adapters alone",
    "--allow": r"messages of a class travel in a format",
    "--allow-rounding": r"messages of every class that can be rounded",
    "--axes": r"^axes to search",
    "--base": r"base model's name",
    "--batch": r"^sequences (a step|of a batch)",
    "--best": r"^plans to show",
    "--chat": r"what a user says",
    "--cluster": r"cluster preset",
    "--compute": r"dtype of parameters and messages",
    "--config": r"TOML file (of the run|with any of the sections)",
    "--context": r"tokens of a window",
    "--counters": r"bytes every link carried",
    "--csv": r"torch's CSV form",
    "--data": r"^text or JSONL file|any source for data.path",
    "--data.chat_template": r"chat template of conversations",
    "--data.column": r"key or column",
    "--data.format": r"^text, or conversations",
    "--data.separator": r"between the documents",
    "--data.split": r"split of a data set",
    "--device": r"cpu, cuda",
    "--distribution": r"built-in distribution",
    "--documents": r"first N documents",
    "--dtype": r"^dtype of (the )?weights",
    "--experts": r"copies of every MLP",
    "--explain": r"start nothing",
    "--folder": r"run folder to make",
    "--force": r"^replace (the|files)",
    "--format": r"^hf: safetensors",
    "--full-attention-flops": r"attention counted as its full square",
    "--headroom": r"memory of a device to leave free",
    "--json": r"one JSON object",
    "--limit": r"plans to simulate at most",
    "--lines": r"lines of the program",
    "--min-p": r"at least P times the probability",
    "--model": r"Hugging Face (folder|config)",
    "--names": r"names of parameters",
    "--network": r"links of every tier",
    "--nodes": r"members of the outermost tier",
    "--noise": r"standard deviation of the router's rows",
    "--out": r"^(plan|page|cluster file) to write",
    "--outer": r"synchronise the outermost tier",
    "--paced": r"build no network",
    "--page": r"HTML page of the step",
    "--parts": r"cut each copy",
    "--per-token": r"copies that a token passes",
    "--picture": r"write .*a picture",
    "--pin": r"fix a choice",
    "--place": r"placement of the roles",
    "--plan": r"plan preset|plan to compare",
    "--port": r"^port of",
    "--price": r"price of one device for one hour",
    "--prompt": r"text to continue",
    "--ranks": r"resize the cluster's tiers",
    "--ray": r"Ray cluster",
    "--recompute": r"recompute these operations",
    "--resume": r"(resume|go on with) this run folder",
    "--scale": r"multiply every bandwidth",
    "--seconds": r"seconds for",
    "--seed": r"^seed of the (draws|rows)",
    "--sequence": r"^tokens (a|of a) sequence",
    "--shard-bytes": r"largest file of weights",
    "--stage": r"pipeline stage",
    "--step": r"^the (step|checkpoint after this step)",
    "--stop": r"end a continuation",
    "--task": r"task that ships",
    "--temperature": r"how freely",
    "--tokenizer": r"tokenizer.json",
    "--tokens": r"^tokens to (add|train on)",
    "--top-k": r"the K likeliest",
    "--top-p": r"probability P",
    "--trace": r"trace for Perfetto",
    "--verbose": r"begin with the (tables|pages)",
    "--version": r"show program's version",
    "--view": r"where the time goes",
    "--watch": r"serve the page",
    "--weights-only": r"leave out the states of the optimizer",
}


def _options(parser: argparse.ArgumentParser, command: str = "") -> Iterator[tuple[str, argparse.Action]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from _options(inner, f"{command} {name}".strip())
        elif action.dest != "help":
            yield command, action


OPTIONS = [(command, action) for command, action in _options(whole_parser()) if action.option_strings]


def test_one_meaning_has_one_name_over_all_commands() -> None:
    assert {action.option_strings[-1] for _, action in OPTIONS} == set(MEANINGS)
    for command, action in OPTIONS:
        meant = {name for name, words in MEANINGS.items() if re.search(words, action.help or "")}
        assert meant == {action.option_strings[-1]}, f"{command}: {action.help}"


def test_a_name_takes_the_same_kind_of_value_everywhere() -> None:
    kinds = defaultdict(set)
    for _, action in OPTIONS:
        kinds[action.option_strings[-1]].add((action.type, action.nargs == 0))
    # A name is a path of a file that is written, or the text of one that is read; --tokens may be 300e9 in a plan.
    differing = {name for name, found in kinds.items() if len(found) > 1}
    assert differing <= {"--tokens", "--resume", "--price"}, {name: kinds[name] for name in differing}


@pytest.mark.parametrize("command", sorted(_OPTIONS))
def test_an_alias_is_no_name_of_its_own_and_stands_for_one(command: str) -> None:
    own = {name for where, action in OPTIONS if where.split()[:1] == [command] for name in action.option_strings}
    for alias, name in _OPTIONS[command].items():
        assert alias not in own
        assert name in own or re.match(r"--(train|optimizer|run)\.\w+$", name), f"{command} {alias}"


def test_a_run_is_the_first_word_of_every_command_that_looks_at_one() -> None:
    first: dict[str, str] = {}
    for command, action in _options(whole_parser()):
        if not action.option_strings and command not in first:
            first[command] = str(action.metavar)
    assert {command for command, word in first.items() if word in ("RUN", "FOLDER")} == set(_OF_A_RUN)
    named = {name for command, action in OPTIONS if command in _OF_A_RUN for name in action.option_strings}
    assert not named & set(_RUN)
