"""`terrace keys`: every key, with the defaults of the dataclasses and the names of the pages."""

import json
import re
from pathlib import Path

import pytest

from terrace.cli.keys import dotted, keys_of, names, sections
from terrace.cli.main import main
from terrace.plan.keep import ALL_ON_DEVICE
from terrace.plan.outer import ONE_ISLAND
from terrace.train.keys import TrainConfig
from terrace.train.resolve import resolve
from terrace.train.rules import NUMBERS
from tests.support.command_line import without_torch

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("section", sections())
def test_every_key_has_a_line(section: str) -> None:
    for key in keys_of(section):
        assert key.line, f"{section}.{key.name} has no comment in its dataclass"
        assert key.kind


_ABSENT = ("shares", "order", "epochs", "arguments", "states")  # keys whose empty default stands for none


def test_defaults_are_those_of_a_run() -> None:
    keys = {key.name: key for key in keys_of("train")}
    run = resolve(None, {}, {})
    assert keys["steps"].default == str(run.train.steps)
    assert keys["timeout_s"].default == str(TrainConfig.timeout_s)
    assert keys["attention"].kind.startswith('"auto" | "sdpa"')
    assert (keys["prompt"].default, keys["metrics"].kind) == ("none", "list")
    assert {key.name: key.default for key in keys_of("lora")}["rank"] == "required"
    for section in ("train", "optimizer", "data", "plan"):
        for key in keys_of(section):
            value = getattr(getattr(run, section), key.name)
            is_absent = value in (None, ONE_ISLAND, ALL_ON_DEVICE) or key.name in _ABSENT
            wanted = "none" if is_absent else json.dumps(value)
            if section == "plan" and key.name in NUMBERS:
                wanted = "the fastest"
            assert key.default == wanted, (section, key.name)


@pytest.mark.parametrize(
    ("asked", "lines"),
    [
        ("optimizer.lr", ["optimizer.lr = 0.0025 (number): peak learning rate; 2e-05 on loaded weights"]),
        ("--optimizer.lr", ["optimizer.lr = 0.0025"]),
        ("--num-epochs", ["train.epochs = none (number)", "run.steps = 40"]),
        ("epochs", ["train.epochs = none (number)", "run.epochs = 1"]),
        ("lr", ["optimizer.lr = ", "plan.outer.lr = "]),
        ("clip", ["optimizer.clip = "]),
    ],
)
def test_a_section_a_key_or_a_word(
    asked: str, lines: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["keys", asked]) == 0
    found = capsys.readouterr().out.splitlines()
    for line in lines:
        assert any(each.startswith(line) for each in found), line


@pytest.mark.parametrize(
    ("asked", "page"), [("cluster.tiers", "clusters.md"), ("model.hidden_size", "hugging-face.md")]
)
def test_keys_that_have_a_page_name_it(asked: str, page: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", asked]) == 2
    assert f"are not listed here: see docs/{page}" in capsys.readouterr().err


def test_all_sections_are_listed_without_torch() -> None:
    said = without_torch("keys").stdout.splitlines()
    for section in names():
        assert any(line.startswith((f"[{section}]", f"[[{section}]]")) for line in said), section
    assert "run.responses" not in dotted("train")


def test_pages_name_keys_that_are_there() -> None:
    """The tables of docs/training.md: `section.key` in their first column."""
    known = {f"{section}.{key.name}" for section in sections() for key in keys_of(section)}
    rows = re.findall(r"^\| (`[^|]*) \|", (DOCS / "training.md").read_text(), re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`((?:train|data|optimizer|plan|lora)\.\w+)`", row)}
    assert len(named) > 20
    assert named <= known


def test_a_section_is_printed_within_the_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    assert main(["keys", "data"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[data]"
    assert "[[data.mixture]]" in lines
    assert "[train]" not in lines
    assert max(map(len, lines)) <= 60
    assert main(["keys", "trian"]) == 2
    assert "there is no section 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main(["keys", "cluster"]) == 2
    assert "see docs/clusters.md" in capsys.readouterr().err
