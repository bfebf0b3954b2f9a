"""Every kind of file that a run leaves, damaged once: refused, repaired, without effect, or said; never silently wrong.

The whole campaign is `python -m tests.chaos.damage`.
"""

from collections import Counter
from pathlib import Path

import pytest

from terrace.launch.start import LocalPool
from tests.chaos.damage import KINDS, campaign, kinds_of
from tests.chaos.left import Scene
from tests.support.nightly import nightly

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("first", [0, *nightly(1)], ids=["every second kind", "the others"])
def test_a_damaged_file_of_every_kind_is_found_or_harmless(pool: LocalPool, tmp_path: Path, first: int) -> None:
    scene = Scene(tmp_path / "scene", pool)
    try:
        scene.make()
        found = [each for number in range(first, len(KINDS), 2) for each in campaign(scene, 1, seed=1, first=number)]
    finally:
        scene.close()
    wrong = [f"{each.case}: {each.why}" for each in found if each.outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
    counts = Counter(each.outcome for each in found)
    # The campaign sees each outcome, so none is a name alone.
    assert min(counts[outcome] for outcome in ("refused", "repaired", "without effect", "said")) > 0, counts


def test_a_file_that_no_kind_knows_fails_the_campaign() -> None:
    with pytest.raises(AssertionError, match=r"run/news\.bin is of no kind"):
        kinds_of(["run/config.toml", "run/news.bin"])
    with pytest.raises(AssertionError, match="no run leaves a file of kind"):
        kinds_of(["run/config.toml"])
