"""Screens of 80 columns and fewer: tables keep every name, the line of a step its figures, pipes no blanks."""

import io
import sys
from dataclasses import replace

import pytest

from terrace.cli.step_progress import ProgressLine, step_words
from terrace.cli.terminal import Terminal
from terrace.report.tables import new_table
from terrace.train.metrics import StepRecord

HEADINGS = ("", "step", "tokens/s", "MFU", "memory", "params", "grads", "optimizer", "micro-batch", "notes")
ROW = ("1", "57.6 ms", "1.14 M", "16.3 %", "7.39 GB", "package", "system", "package", "4 x 1", "recompute layers.* 0")
RECORD = StepRecord(
    step=7,
    loss=5.615,
    grad_norm=8.2,
    learning_rate=1.25e-4,
    num_tokens=64,
    step_s=1.0,
    tokens_per_s=1560.0,
    time_s={},
    mfu=0.173,
    peak_memory_bytes={"resident": 294_000_000},
)


@pytest.mark.parametrize("columns", ["40", "80", "120", None])
def test_a_table_in_a_pipe_follows_columns(columns: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "__stdout__", screen)
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    Terminal().print(new_table("plans", HEADINGS, left=("params", "grads", "optimizer", "notes"), rows=[ROW]))
    lines = screen.getvalue().splitlines()
    assert max(map(len, lines)) <= int(columns or 120)
    assert all(line == line.rstrip() for line in lines)
    assert "…" not in screen.getvalue()
    if columns != "40":
        (row,) = (line for line in lines if "57.6 ms" in line)
        assert row.count("package") == 2
        assert "system" in row
        assert {"recompute", "layers.*"} <= set(screen.getvalue().split())


def test_the_line_of_a_step_fits_80_columns() -> None:
    whole = step_words(RECORD, 10_000, 75.0)
    assert len(whole) > 80
    line = step_words(RECORD, 10_000, 75.0, 80)
    assert len(line) <= 80
    for figure in ("step     7/10000", "loss 5.615", "1.56 ktokens/s", "MFU 17.3 %", "1:15 left"):
        assert figure in line
    assert "resident" not in line
    # A wider record leaves out more, and no figure is cut.
    assert "lr" not in step_words(
        replace(RECORD, balance=0.93, pairs={"accuracy": 1.0, "margin": 2.0}), 10_000, 75.0, 80
    )


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_stands_only_where_the_figures_leave_room(monkeypatch: pytest.MonkeyPatch) -> None:
    for width, num_bars in ((80, 0), (140, 1)):
        screen = _Terminal()
        monkeypatch.setattr(sys, "stdout", screen)
        monkeypatch.setenv("COLUMNS", str(width))
        ProgressLine(Terminal(), 10_000, 10).show(RECORD, 75.0)
        assert screen.getvalue().count("MFU 17.3 %") == 1
        assert ("\u2501" in screen.getvalue()) == bool(num_bars)
