"""Words of other trainers, translated aloud."""

from pathlib import Path

import pytest

from terrace.cli.aliases import _KEYS, _PLANS, translated
from terrace.cli.main import main
from terrace.plan.presets import PRESETS
from terrace.train.resolve import resolve


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
        (
            "plan --seq 8 --output=p.toml",
            "plan --sequence 8 --out=p.toml",
            ["--seq is --sequence here", "--output is --out here"],
        ),
        (
            "scale --train.batch 8 --out a.svg",
            "scale --batch 8 --picture a.svg",
            ["--train.batch is --batch here", "--out is --picture here"],
        ),
        (
            "train --batch 8 --output_dir a",
            "train --train.batch 8 --folder a",
            ["--batch is --train.batch here", "--output_dir is --folder here"],
        ),
        ("data prepare --seq 8", "data prepare --train.sequence 8", ["--seq is --train.sequence here"]),
        ("data lengths docs --seq 8", "data lengths docs --sequence 8", ["--seq is --sequence here"]),
        (
            "generate --run a --top_p .9",
            "generate a --top-p .9",
            ["--top_p is --top-p here", "--run a is the first word here: terrace generate a"],
        ),
        ("export out --run=a", "export a out", ["--run a is the first word here: terrace export a"]),
        ("export a b --run", "export a b --run", []),  # without a value: refused as it stands
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
