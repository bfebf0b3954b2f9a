"""An option has the same name in all commands, and a name the same meaning; other names are translated."""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterator

from terrace.base.coming_from import OPTIONS as OTHERS
from terrace.cli.main import parser_of

# Name of an option -> a pattern that its help matches in every command, and the help of no other option.
MEANINGS = {
    "--adapter": r"adapters alone",
    "--allow": r"messages of a class travel in a format",
    "--allow-rounding": r"messages of every class that can be rounded",
    "--as": r"^software whose kernels",
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
    "--fault": r"island 2 kill at exchange 3",
    "--folder": r"run folder to make",
    "--force": r"^replace (the|files)",
    "--format": r"^hf: safetensors",
    "--full-attention-flops": r"attention counted as its full square",
    "--heads": r"share of the key-value heads",
    "--headroom": r"memory of a device to leave free",
    "--intermediate": r"inner features of MLPs",
    "--island": r"name of this island",
    "--islands": r"islands with which the run begins",
    "--json": r"one JSON object",
    "--layers": r"share of the layers",
    "--lengths": r"rows that hold several documents",
    "--limit": r"plans to play at most",
    "--lines": r"lines of the program",
    "--log": r"log of decisions",
    "--meet": r"one island of the roster",
    "--min-p": r"at least P times the probability",
    "--model": r"Hugging Face (folder|config)",
    "--names": r"names of parameters",
    "--network": r"links of every tier",
    "--nodes": r"members of the outermost tier",
    "--noise": r"standard deviation of the router's rows",
    "--offers": r"TOML file of offers",
    "--out": r"^(plan|page|cluster file|file of lengths) to write",
    "--outer": r"synchronise the outermost tier",
    "--paced": r"build no network",
    "--page": r"HTML page (of the step|with costs|with a chart of cost)",
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
    "--robust": r"least regret",
    "--scale": r"multiply every bandwidth|tier to all",
    "--seconds": r"seconds for",
    "--seed": r"^seed of the (draws|rows)",
    "--sequence": r"^tokens (a|of a) sequence",
    "--shard-bytes": r"largest file of weights",
    "--stage": r"pipeline stage",
    "--step": r"^the (step|checkpoint after this step)",
    "--stop": r"end a continuation",
    "--task": r"task that ships",
    "--teacher": r"^teacher of the run",
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


OPTIONS = [(command, action) for command, action in _options(parser_of()) if action.option_strings]


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
    # A rehearsal's --scale is a factor.
    differing = {name for name, found in kinds.items() if len(found) > 1}
    assert differing <= {"--tokens", "--resume", "--price", "--scale"}, {name: kinds[name] for name in differing}


def test_other_names_are_of_no_command() -> None:
    """Only a name that is ours in one command, and another's in a second, stands on both sides."""
    others = {name for names in OTHERS.values() for name in names}
    ours = {name for names in OTHERS for name in names}
    assert (others & set(MEANINGS)) - ours == {"--page", "--seed"}
