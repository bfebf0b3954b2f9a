"""A run whose ranks are killed again and again loses as much time as the closed form of goodput says."""

from pathlib import Path

import pytest

from tests.chaos.goodput import play


@pytest.mark.nightly
@pytest.mark.timeout(1600)
def test_goodput_of_a_run_that_is_killed(tmp_path: Path) -> None:
    """300 steps; at least four kills, so that chance is a few percent."""
    found = play(tmp_path)
    assert found.num_kills >= 4
    assert found.predicted == pytest.approx(found.goodput, rel=0.05), str(found)
