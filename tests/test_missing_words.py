"""The documents do not call missing what is there: sentences about that are held against keys, commands and options."""

import argparse
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from terrace.cli.keys import sections
from terrace.cli.main import all_help, parser_of
from terrace.cluster.cluster import Cluster, Device, Kernels, Tier

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
MISSING = re.compile(
    r"\b(not built|not (?:yet )?(?:supported|implemented|possible|available)|(?:is|are|what is) missing|unsupported|"
    r"not (?:there )?yet|no (?:command|option|key|way)\b|does not exist|offers no)",
    re.IGNORECASE,
)
# What readers ask for, and the key or command that has it: a sentence that calls it missing is stale.
FEATURES = {
    r"local (updates|steps)|diloco|outer loop": "plan.outer",
    r"evaluat\w+": "train.eval_every",
    r"adapters?": "lora",
    r"resum\w+": "train.checkpoint_every",
    r"recomput\w+": "plan.recompute",
    r"profil\w+|traces?": "train.profile",
    r"packing|mixtures? of sources": "data.mixture",
    r"expert parallel\w*": "plan.experts",
    r"compil\w+": "train.compile",
}
# Sentences that are true all the same, by how they begin, with the reason.
TRUE = {
    "`terrace doctor` says what it found on the machine": "what the machine lacks",
    "Rows beyond a stated number in further chunks are not built": "the key recomputes whole operations",
}


def _sentences(text: str) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.S)
    for block in re.split(r"\n\s*\n|\n(?=[-*|] )|\n(?=#)", text):
        for sentence in re.split(r"(?<=[.?])\s+(?=[A-Z`*\"])", " ".join(block.split())):
            if sentence.strip(" -*|"):
                yield sentence.strip(" -*|")


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)


def _known() -> set[str]:
    tables = {**sections(), "device": Device, "kernels": Kernels, "tier": Tier, "cluster": Cluster}
    found = {f"{section}.{field.name}" for section, table in tables.items() for field in dataclasses.fields(table)}
    found |= {*sections(), *(f"terrace {command}" for command in all_help())}
    return found | {
        option for command in all_help() for option in _options(parser_of([command])) if option.startswith("--")
    }


def stale(text: str, known: set[str]) -> list[str]:
    """Sentences that call something missing which is known, each with its name."""
    found = []
    for sentence in _sentences(text):
        if not MISSING.search(sentence) or any(sentence.startswith(words) for words in TRUE):
            continue
        named = {part for code in re.findall(r"`([^`]+)`", sentence) for part in _names(code)}
        named |= {key for words, key in FEATURES.items() if re.search(rf"\b({words})\b", sentence, re.IGNORECASE)}
        found += [f"{name}: {sentence}" for name in sorted(named & known)]
    return found


def _names(code: str) -> list[str]:
    words = code.split()
    # `terrace eval RUN`, `--train.steps 3`, `train.steps = 3`, `[lora]`
    return [" ".join(words[:2]), words[0], words[0].removeprefix("--"), words[0].strip("[]")]


@pytest.fixture(scope="module")
def known() -> set[str]:
    found = _known()
    assert {"plan.outer", "train.eval_every", "terrace eval", "--resume", "lora", "tier.bus"} <= found
    return found


def test_no_document_calls_missing_what_is_there(known: set[str]) -> None:
    found = [f"{path.name}: {line}" for path in DOCS for line in stale(path.read_text(encoding="utf-8"), known)]
    assert not found, "\n".join(found)


def test_features_and_exceptions_are_still_of_use(known: set[str]) -> None:
    assert set(FEATURES.values()) <= known
    sentences = [each for path in DOCS for each in _sentences(path.read_text(encoding="utf-8"))]
    for words in TRUE:
        assert any(each.startswith(words) and MISSING.search(each) for each in sentences), words


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("**What is missing?** Offload and local updates, see below.", "plan.outer"),
        ("As in other plans, no command evaluates while it trains.", "train.eval_every"),
        ("There is no way to stop it: `terrace eval RUN` is\nnot built.", "terrace eval"),
        ("Not built: `--train.profile 3`.", "train.profile"),
        ("| `[lora]` | not supported |\n| x | adapters are not implemented |", "lora"),
        ('`plan.outer = "diloco"` is not there yet.', "plan.outer"),
    ],
)
def test_stale_sentences_are_found(text: str, name: str, known: set[str]) -> None:
    found = stale(text, known)
    assert found
    assert all(each.startswith(f"{name}: ") for each in found)


@pytest.mark.parametrize(
    "text", ["Offload is not built.", "`terrace eval RUN` scores a file.", "`--nothing` is missing."]
)
def test_true_sentences_are_let_be(text: str, known: set[str]) -> None:
    assert stale(text, known) == []
