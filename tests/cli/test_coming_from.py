"""Every row of the tables for users of other trainers is a run of the default model that can be predicted."""

import re
import shlex
from pathlib import Path

import pytest

from terrace.cli.main import main

# With heads and layers that an axis of two ranks divides.
SIZES = ("--model.num_attention_heads", "4", "--model.num_key_value_heads", "4")

PAGE = Path(__file__).parents[2] / "docs" / "coming-from.md"
_ROW = re.compile(r"^\| (.*?) \| (.*?) ?\| (.*?) ?\|$", re.M)
# Rows that point to another page, or to files that the test has not.
_ELSEWHERE = ("FOLDER", "PREFIX", "RUN")


def _rows() -> list[str]:
    rows = [own for _, own, _ in _ROW.findall(PAGE.read_text(encoding="utf-8")) if own.startswith("`--")]
    return sorted({own.strip("`") for own in rows if not any(word in own for word in _ELSEWHERE)})


def test_there_are_four_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.M) == ["torchtitan", "Hugging Face Trainer", "DeepSpeed", "Megatron-LM"]
    assert len(_ROW.findall(text)) > 70
    assert len(_rows()) > 40


@pytest.mark.parametrize("words", _rows())
def test_a_row_can_be_predicted(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["simulate", *SIZES, *shlex.split(words)])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "sequences x" in said.out
