"""`terrace keys`: every key, with the defaults of the dataclasses and the names of the pages."""

import json
import re
from pathlib import Path

import pytest

from terrace.cli.keys import SECTIONS, keys_of
from terrace.cli.main import main
from terrace.train.config import resolve
from terrace.train.keys import TrainConfig

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_has_a_line(section: str) -> None:
    for key in keys_of(section):
        assert key.line, f"{section}.{key.name} has no comment in its dataclass"
        assert key.kind


def test_defaults_are_those_of_a_run() -> None:
    keys = {key.name: key for key in keys_of("train")}
    run = resolve(None, {}, {})
    assert keys["steps"].default == str(run.train.steps)
    assert keys["timeout_s"].default == str(TrainConfig.timeout_s)
    assert keys["attention"].kind.startswith('"auto" | "sdpa"')
    assert (keys["prompt"].default, keys["metrics"].kind) == ("none", "list")
    assert {key.name: key.default for key in keys_of("lora")}["rank"] == "required"
    assert {key.name: key.default for key in keys_of("plan")}["params"] == json.dumps(run.plan.params)


def test_pages_name_keys_that_are_there() -> None:
    """The tables of docs/training.md: `section.key` in their first column."""
    known = {f"{section}.{key.name}" for section in SECTIONS for key in keys_of(section)}
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
    assert "[data.mixture]" in lines
    assert "[train]" not in lines
    assert max(map(len, lines)) <= 60
    assert main(["keys", "trian"]) == 2
    assert "there is no section 'trian'; did you mean 'train'?" in capsys.readouterr().err
    assert main(["keys", "cluster"]) == 2
    assert "see docs/clusters.md" in capsys.readouterr().err
