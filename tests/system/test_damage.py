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

ALL = range(len(KINDS))


@pytest.mark.parametrize(
    "numbers", [ALL[::6], *nightly(ALL[::2], ALL[1::2])], ids=["a sixth of the kinds", "half", "half"]
)
def test_a_damaged_file_of_every_kind_is_found_or_harmless(pool: LocalPool, tmp_path: Path, numbers: range) -> None:
    scene = Scene(tmp_path / "scene", pool)
    try:
        scene.make()
        found = [each for number in numbers for each in campaign(scene, 1, seed=1, first=number)]
    finally:
        scene.close()
    wrong = [f"{each.case}: {each.why}" for each in found if each.outcome == "wrong"]
    assert not wrong, "\n".join(wrong)
    counts = Counter(each.outcome for each in found)
    # Half of a campaign sees each outcome, so none is a name alone; a sixth sees two.
    outcomes = ("refused", "repaired", "without effect", "said")
    assert min(counts[each] for each in outcomes) > 0 or (numbers == ALL[::6] and len(counts) > 1), counts


def test_a_file_that_no_kind_knows_fails_the_campaign() -> None:
    with pytest.raises(AssertionError, match=r"run/news\.bin is of no kind"):
        kinds_of(["run/config.toml", "run/news.bin"])
    with pytest.raises(AssertionError, match="no run leaves a file of kind"):
        kinds_of(["run/config.toml"])
