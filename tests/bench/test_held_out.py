"""What the pages say of the steps that the cost model was not built on."""

import re
import statistics
from pathlib import Path

import pytest

from bench.validation import held_out
from bench.validation.__main__ import PAGE
from bench.validation.published import published_s
from terrace.simulate.bands import OWN, Validated, validated

ROOT = Path(__file__).parents[2]


def _unseen() -> list[Validated]:
    return [row for row in validated() if row.source in held_out.SOURCES and row.software == OWN]


def test_tables_of_the_page_have_as_many_cells_as_headings() -> None:
    """A row with a cell too many loses its last one in the rendered page, which was that of the error."""
    text = PAGE.read_text(encoding="utf-8")
    tables = [block.splitlines() for block in re.findall(r"(?:^\|.*\n)+", text, re.M)]
    assert len(tables) > 15
    for table in tables:
        assert len({line.count("|") for line in table}) == 1, table[0]
    (steps,) = (table for table in tables if table[0].endswith("| published, s | as named | error |"))
    cells = [dict(zip(steps[0].split(" | "), line.split(" | "), strict=True)) for line in steps[2:]]
    for line, row, found in zip(held_out.lines(), _unseen(), cells, strict=True):
        assert found["precision"] == line["precision"]
        assert float(found["published, s"]) == pytest.approx(published_s(line), rel=1e-3)
        assert found["error |"] == f"{row.error:+.1%} |"


def test_steps_of_one_program_are_one_source() -> None:
    sources = [held_out.program_of(line) for line in held_out.lines()]
    assert set(held_out.SOURCES) - set(sources) == {"trainy", "torchao"}
    assert [row.source for row in _unseen()] == sources


def test_the_page_on_plans_says_what_bands_do_not() -> None:
    """The bias, how far a band hangs on one source, and the generation whose only source is outside of it."""
    text = " ".join((ROOT / "docs/planning.md").read_text(encoding="utf-8").split())
    rows = _unseen()
    late = sum(row.error < 0 for row in rows)
    by_name = {name: [row.error for row in rows if row.source == name] for name in {row.source for row in rows}}
    bias = -statistics.fmean(statistics.fmean(errors) for errors in by_name.values())
    means = [statistics.fmean(map(abs, errors)) for errors in by_name.values()]
    held = {each.name: each for each in held_out.leave_one_out(rows)}
    ampere, hopper = held["Ampere"], held["Hopper"]
    power = [row.miss for row in rows if row.generation == "Blackwell"]
    largest = max((row for row in rows if row.generation == "Hopper"), key=lambda row: row.miss)
    assert largest.task.startswith("torchtitan h100-96gb Llama 3 8B 262144")
    hopper_rows = [row for row in rows if row.generation == "Hopper" and "context" not in row.axes]
    usual = max(hopper_rows, key=lambda row: row.miss)
    assert usual.task == "kempner dgx-h200 Llama 3 70B 4096 bf16"
    assert usual.devices == 8
    for words in (
        f"{late} of {len(rows)} published steps took longer than predicted",
        f"predictions are {bias:.0%} too short in the mean over sources",
        f"this holds for {ampere.coverage:.0%} (Ampere) and {hopper.coverage:.0%} (Hopper)",
        f"that of Ampere lies between {min(ampere.widths):.0%} and {max(ampere.widths):.0%}",
        f"that of Hopper between {min(hopper.widths):.0%} and {max(hopper.widths):.0%}",
        f"misses by {min(power):.0%} to {max(power):.0%}, so the band there is {max(power):.0%}",
        f"its band is their largest miss, {usual.miss:.0%}, of a 70B on eight H200",
        f"whose largest miss is {largest.miss:.0%}: torchtitan with 262,144 tokens",
        f"whose mean errors go from {min(means):.0%} to {max(means):.0%}",
    ):
        assert words.replace("%", " %") in text, words
