"""Screens of 80 columns and fewer: tables keep every name, the line of a step its figures, pipes no blanks."""

import io
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.cli.probe import show_constants
from terrace.cli.step_progress import ProgressLine, step_words
from terrace.cli.terminal import Terminal
from terrace.cluster.presets import load_cluster
from terrace.probe.assemble import assemble
from terrace.report.table import Table
from terrace.train.metrics import StepRecord
from tests.support.nightly import in_turns
from tests.support.planning import Planning, here
from tests.support.probed import synthetic

__all__ = ["here"]

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
    Terminal().print(
        Table(title="plans", headings=HEADINGS, left=("params", "grads", "optimizer", "notes"), rows=[ROW])
    )
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


def _printed(table: Table, width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    screen = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "__stdout__", screen)
        patch.setenv("COLUMNS", str(width))
        Terminal().print(table)
    return screen.getvalue()


def _check_whole(shown: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    table = shown.__rich__()
    for width in (60, 80, 120):
        printed = _printed(shown, width, monkeypatch)
        assert max(map(len, printed.splitlines())) <= width
        cells = [str(cell) for column in table.columns for cell in column.cells]
        missing = Counter(" ".join(cells).split()) - Counter(printed.split())
        assert not missing, f"at {width} columns:\n{printed}"
        # A number keeps its unit on its line; only a comma separates figures.
        lines = [" ".join(line.split()) for line in printed.splitlines()]
        for column in table.columns:
            for cell in column.cells if column.justify == "right" else ():
                for figure in str(cell).split(", "):
                    assert any(figure in line for line in lines), f"{figure!r} at {width} columns:\n{printed}"


# Commands whose tables are wide: shapes of several axes, notes, links with long words, many kinds of waits.
_WIDE = (
    ("plan", "--cluster", "ethernet", "--nodes", "2", "--tokens", "3e9", "--limit", "60"),
    (
        "plan",
        "--scale",
        "--cluster",
        "dgx-h100",
        "--nodes",
        "4",
        "--plan",
        "zero3",
        "--price",
        "3",
        "--full-attention-flops",
    ),
    ("simulate", "ddp", "--plan.mapping.node.tensor", "2", "--plan.mapping.node.pipeline", "4"),
    ("simulate", "zero3", "--plan.mapping.node.context.ring", "4", "--plan.mapping.node.data", "2"),
)


@pytest.mark.parametrize("words", in_turns(2, _WIDE), ids=lambda words: " ".join(words[:2]))
def test_no_figure_of_a_table_is_cut_at_60_or_80_columns(
    words: tuple[str, ...], here: Planning, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []
    sizes = ["--batch", "64", "--sequence", "256"]
    if words[0] == "simulate":
        sizes = ["--train.batch", "64", "--train.sequence", "256", "--cluster", "ethernet"]
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "print", lambda self, *objects, **options: tables.extend(objects))
        patch.setenv("COLUMNS", "80")
        said = here.call(*words, "--model", here.model, *sizes)
    assert said.code == 0, said.error
    # Other lines fit, too; commands to be copied stay in one line.
    assert max(len(line) for line in said.out.splitlines() if "terrace " not in line) <= 80
    tables = [each for each in tables if isinstance(each, Table)]
    assert len(tables) >= 2
    for table in tables:
        _check_whole(table, monkeypatch)


def test_no_figure_of_a_probe_is_cut(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tables: list[Any] = []
    cluster = load_cluster("dgx-a100")
    with monkeypatch.context() as patch:
        patch.setattr(Terminal, "print", lambda self, *objects, **options: tables.extend(objects))
        show_constants(assemble(cluster, synthetic(cluster)), tmp_path / "cluster.toml")
    (table,) = tables
    _check_whole(table, monkeypatch)


def test_columns_without_room_stand_below_with_the_columns_that_name_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"stage {number}" for number in range(10)]
    rows = [[message, "node", *(f"{number}.25 GB" for number in range(10)), ""] for message in ("gather", "reduce")]
    rows.append(["sync", "", *["-"] * 5, *[""] * 6])
    table = Table(title="bytes", headings=["message", "tier", *names, "empty"], left=("message", "tier"), rows=rows)
    first, second = (part.splitlines() for part in _printed(table, 80, monkeypatch).split("\n\n\n"))
    assert first[0] == "bytes"
    assert [line.split()[0] for line in first[4:]] == ["gather", "reduce", "sync"]
    # A row without further cells is left out, and so is an empty column.
    assert [line.split()[:2] for line in second[2:] if line] == [["gather", "node"], ["reduce", "node"]]
    assert "empty" not in first[2] + second[0]
    # A screen too narrow for one column breaks words, and loses none of their characters.
    tiny = "".join(_printed(table, 12, monkeypatch).split())
    assert all(tiny.count(digit) >= 2 for digit in "0123456789")
