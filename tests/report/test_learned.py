"""The figures that `terrace plan` quotes are those of the page's table."""

import re
import statistics
from pathlib import Path

import pytest

from terrace.plan.outer import Outer
from terrace.report.learned import RISES, SOURCE, loop_learned

PAGE = Path(__file__).parents[2] / "docs" / "slow-networks.md"


def test_rises_are_the_means_of_the_table() -> None:
    heading = SOURCE.split('"')[1]
    section = PAGE.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = dict[str, float]()
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        row = re.match(r"`([\w.-]+)`: ", cells[1]) if len(cells) > 6 else None
        if row is not None and cells[6]:
            rises = [float(each) for each in cells[6].split(" %")[0].split(",")]
            found[row[1]] = statistics.mean(rises)
    assert RISES.keys() <= found.keys()
    for name, rise in RISES.items():
        assert found[name] == pytest.approx(rise, abs=0.06), name


@pytest.mark.parametrize(
    ("outer", "formats", "said"),
    [
        (Outer(tier="system", every=19), (), "20 steps between exchanges +2.1 % to a synchronous run"),
        (Outer(tier="system", every=1000), (), "50 steps between exchanges +5.3 %"),
        (
            Outer(tier="system", every=2),
            ("topk:32+feedback",),
            "+2.9 % to a synchronous run, topk:32+feedback +3.9 % more",
        ),
        (
            Outer(tier="system", every=50, delay=10),
            ("int4+feedback",),
            "a fifth of a cycle +0.6 % more, int4+feedback +0.1 % more",
        ),
        (Outer(tier="system", every=10, delay=10), (), "+2.2 % to a synchronous run, a delay of a cycle +4.3 % more"),
        (Outer(tier="system", every=20, delay=20, keep=0.0, penalty=True), (), "keep 0 with the penalty +7.3 % more"),
        (Outer(tier="system", every=20, delay=20, keep=0.0), (), "keep 0 without the penalty +10.4 % more"),
    ],
)
def test_the_nearest_figures_are_quoted(outer: Outer, formats: tuple[str, ...], said: str) -> None:
    assert said in loop_learned(outer, formats)
