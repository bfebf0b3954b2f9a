"""The page's table of three-level partitioning on Frontier is what the assumptions give."""

import re
from pathlib import Path

import pytest

from bench.three_level import ASSUMPTIONS, GAINS, KEPT

PAGE = Path(__file__).parents[2] / "docs" / "planning.md"
ROWS = {
    cells[0]: [float(each) for each in cells[1:]]
    for line in PAGE.read_text(encoding="utf-8").split("### Which assumption")[1].split("\n## ")[0].splitlines()
    if len(cells := re.split(r" *\| *", line.strip("| "))) == 5 and cells[1][:1].isdigit()
}


def test_the_page_has_every_assumption_and_the_published_figures() -> None:
    assert [*ROWS] == [*(each.words for each in ASSUMPTIONS), "published"]
    assert ROWS["published"] == pytest.approx([*GAINS, GAINS[0] * GAINS[1], KEPT], abs=0.006)


@pytest.mark.parametrize("words", ["nested groups, nothing hidden", "the same, one link between modules"])
def test_figures_are_those_of_the_page(words: str) -> None:
    (assumption,) = (each for each in ASSUMPTIONS if each.words == words)
    plus, three, kept = assumption.figures
    assert [plus, three, plus * three] == pytest.approx(ROWS[words][:3], abs=0.02)
    assert kept == pytest.approx(ROWS[words][3], abs=0.005)


def test_three_assumptions_together_come_within_a_fifth_of_the_published_gain() -> None:
    _, three, _, kept = ROWS["the same, one link between modules"]
    assert three > 0.8 * GAINS[1]
    assert kept - KEPT < 0.0501
    # Where messages are hidden, none does: both methods are bound by computing.
    assert all(ROWS[each.words][1] < 1.1 for each in ASSUMPTIONS if each.hides)
