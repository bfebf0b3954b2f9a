"""The page of the hand-over has the predictions, and its first rows are HybridFlow's formulas."""

from pathlib import Path

import pytest

from bench.hand_over import PLANS, dgx, line, rows_of
from tests.support.nightly import nightly

PAGE = Path(__file__).parents[2] / "docs/benchmarks/hand-over.md"


@pytest.mark.parametrize(
    "name", ["tensor 8, 4 stages", *nightly(*(each for each in PLANS if each != "tensor 8, 4 stages"))]
)
def test_the_page_has_these_rows(name: str) -> None:
    rows = list(rows_of(dgx(), 2, [name]))
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert all(line(row) in page for row in rows)
    dealt, neighbours, whole = rows
    # Equal where inner tiers work beside a slower one.
    assert dealt.cost.seconds <= neighbours.cost.seconds < whole.cost.seconds
    assert dealt.peak_bytes < neighbours.peak_bytes < whole.peak_bytes
    if name.startswith("tensor"):
        # (S - g) / (g S) M for equal parts on S ranks: stages are not quite equal, and norms are whole.
        ranks, model = (32 if "stages" in name else 8), whole.peak_bytes
        assert dealt.cost.received_bytes == pytest.approx((ranks - 2) / (2 * ranks) * model, rel=5e-3)
