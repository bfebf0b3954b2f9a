"""Words of other trainers, translated aloud."""

from pathlib import Path

import pytest

from terrace.cli.aliases import _KEYS, _PLANS, translated
from terrace.cli.main import main
from terrace.plan.presets import PRESETS
from terrace.train.config import resolve


def test_every_alias_is_a_plan_or_a_key_of_a_run() -> None:
    assert set(_PLANS.values()) <= set(PRESETS)
    assert not set(_PLANS) & set(PRESETS)
    for key in set(_KEYS.values()):
        section, _, name = key.removeprefix("--").partition(".")
        resolve(None, {}, {section: {name: 16 if name != "sequence" else 32}})


@pytest.mark.parametrize(
    ("words", "own", "said"),
    [
        ("train --plan fsdp2", "train --plan zero3", ["--plan fsdp2 is --plan zero3 here"]),
        ("plan --plan=zero-1", "plan --plan=zero1", ["--plan zero-1 is --plan zero1 here"]),
        ("train --lr 1e-3", "train --optimizer.lr 1e-3", ["--lr is --optimizer.lr here"]),
        ("train --lr=1e-3", "train --optimizer.lr=1e-3", ["--lr is --optimizer.lr here"]),
        ("generate run --seq-len 3", "generate run --seq-len 3", []),  # no keys of a run
        ("generate run --prompt fsdp", "generate run --prompt fsdp", []),
        ("train --plan zero3 --data fsdp", "train --plan zero3 --data fsdp", []),
        ("", "", []),
    ],
)
def test_words_are_translated(words: str, own: str, said: list[str]) -> None:
    assert translated(words.split()) == (own.split(), said)


def test_a_file_of_that_name_is_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp").write_text('preset = "ddp"\n')
    assert translated(["train", "--plan", "fsdp"]) == (["train", "--plan", "fsdp"], [])


def test_the_translation_is_said_and_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--plan", "fsdp", "--seq-len", "32"]) == 0
    said = capsys.readouterr()
    assert said.err == "terrace: --plan fsdp is --plan zero3 here\nterrace: --seq-len is --train.sequence here\n"
    assert "plan zero3" in said.out
    assert "32 sequences x 32 tokens" in said.out
