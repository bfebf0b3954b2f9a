"""Options and plans of other trainers: refused with ours, and shown on a page whose every row can be predicted."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from terrace.cli.coming_from import OPTIONS, PLANS, RUN
from terrace.cli.main import main
from terrace.plan.presets import PRESETS
from terrace.train.resolve import resolve

# With heads and layers that an axis of two ranks divides.
SIZES = ("--model.num_attention_heads", "4", "--model.num_key_value_heads", "4")

SYSTEMS = ("torchtitan", "Hugging Face Trainer", "DeepSpeed", "Megatron-LM")
PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
_ROW = re.compile(r"^\| (.*?) \| (.*?) ?\| (.*?) ?\|$", re.M)
# Rows that point to another page, or to files that the test has not.
_ELSEWHERE = ("FOLDER", "PREFIX", "RUN")


def _rows() -> list[str]:
    text = PAGE.read_text(encoding="utf-8").partition("## Refused names")[0]
    rows = [own for _, own, _ in _ROW.findall(text) if own.startswith("`--")]
    return sorted({own.strip("`") for own in rows if not any(word in own for word in _ELSEWHERE)})


def test_there_are_four_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == [*SYSTEMS, "Refused names"]
    assert len(_ROW.findall(text)) > 70
    assert len(_rows()) > 40


@pytest.mark.parametrize("words", _rows())
def test_a_row_can_be_predicted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", *SIZES, *shlex.split(words)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "sequences x" in said.out


def test_the_page_has_every_name_that_is_refused() -> None:
    """The table of the page is the table of the command line."""
    lines = ["| refused | here |", "|---|---|"]
    for own, others in OPTIONS.items():
        lines.append(f"| {_cell(others)} | {_cell([each for each in own if each != RUN] + [RUN] * (RUN in own))} |")
    for preset, others in PLANS.items():
        lines.append(f"| {_cell([f'--plan {name}' for name in others])} | `--plan {preset}` |")
    page = PAGE.read_text(encoding="utf-8").partition("## Refused names")[2]
    assert [line for line in page.splitlines() if line.startswith("|")] == lines


def _cell(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def test_every_name_of_ours_is_a_plan_or_a_key_of_a_run() -> None:
    assert set(PLANS) <= set(PRESETS)
    assert not {other for others in PLANS.values() for other in others} & set(PRESETS)
    run = resolve(None, {}, {})
    for names in OPTIONS:
        for name in names:
            section, dot, key = name.removeprefix("--").partition(" ")[0].partition(".")
            if dot and section != "run":  # of terrace rl
                assert hasattr(getattr(run, section), key.partition(".")[0]), name


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train --plan fsdp2", "there is no plan 'fsdp2'; did you mean --plan zero3?"),
        ("plan --plan=zero_1", "there is no plan 'zero_1'; did you mean --plan zero1?"),
        ("train --lr 1e-3", "unknown argument '--lr'; did you mean --optimizer.lr?"),
        ("simulate --lr=1e-3", "unknown argument '--lr'; did you mean --optimizer.lr?"),
        ("train --batch 8", "did you mean --train.batch?"),
        ("plan --train.batch 8", "did you mean --batch?"),
        ("plan --seq 8", "unknown argument '--seq'; did you mean --sequence?"),
        ("plan --output=p.toml", "did you mean --out?"),
        ("data prepare --seq 8", "did you mean --train.sequence?"),
        ("data lengths docs --seq 8", "did you mean --sequence?"),
        ("data lengths docs --out a.svg", "did you mean --picture?"),
        ("train --output_dir a", "did you mean --folder?"),
        ("train --max_steps 3", "did you mean --train.steps?"),
        ("rl --max-steps 3", "did you mean --run.steps?"),
        ("generate a --top_p .9", "unknown argument '--top_p'; did you mean --top-p?"),
        ("generate --run a", "unknown argument '--run'; the folder is the first word: terrace generate RUN"),
        ("eval a --seq-len 8", "did you mean --context?"),
        ("train --tensor-model-parallel-size 2", "did you mean --plan.mapping.node.tensor?"),
        ("train --use-distributed-optimizer", "did you mean --plan zero1?"),
        ("explain --plan zero3", "terrace explain is now terrace simulate --view program, with the same options"),
        ("scale --plan zero3", "terrace scale is now terrace plan --scale, with the same options"),
    ],
)
def test_another_name_is_refused_with_ours(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error


def test_a_name_without_a_match_in_a_command_is_refused_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "run", "--prompt", "a", "--seq-len", "3"]) == 2
    assert capsys.readouterr().err == "terrace: error: unknown argument '--seq-len'; see terrace generate --help\n"


def test_a_value_may_be_such_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fsdp").write_text('preset = "ddp"\n')
    main(["simulate", "--plan", "fsdp"])
    assert "did you mean" not in capsys.readouterr().err
    assert main(["generate", "nowhere", "--prompt", "fsdp"]) == 2
    assert "nowhere is neither" in capsys.readouterr().err
