"""Rehearsals with faults: islands as processes that die, freeze, slow down, are cut off, leave and join.

Every fault must keep the promises of docs/elastic.md: the others lose no step, wait for at most the patience and a
second, and nothing is left running.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from terrace.checkpoint.layout import folder_of
from terrace.lab.faults.picture import picture
from terrace.roster.entries import Gone
from tests.support.checkpoints import contents
from tests.support.nightly import nightly
from tests.support.rehearsed import rehearse, rehearse_restarts
from tests.support.tiny_runs import losses

pytestmark = pytest.mark.timeout(300)

BY_DAY = ["island 1 kill within exchange 1"]
# By night one fault of each kind at each place where it differs from another. An island frozen or cut off for 6 s is
# lost, and comes back while the others have steps left; for 1.5 s it is only late. Islands of names that sort first and
# last have different parts in an exchange: the later one connects, and the first one's sums come first.
KILLS = [
    "island 2 kill at step 2",
    "island 1 kill at instruction FORWARD of step 1",
    "island 1 kill at instruction BACKWARD of step 3",
    "island 0 kill at instruction UPDATE of step 2",
    "island 1 kill at exchange 0",
    "island 0 kill at exchange 2",
    "island 0 kill within exchange 0",
    "island 2 kill within exchange 1",
    "island 1 kill within exchange 4",  # the last one
    "island 1 kill at step 2, island 2 kill at step 2",
    "island 0 kill within exchange 1, island 2 kill within exchange 1",
    "island 1 kill at step 2, island 1 join at step 4",
    "island 3 join at step 3, island 0 kill while healing",
    "island 3 join at step 3, island 3 kill while healing",
]
STANDS = [
    "island 1 freeze at step 2",
    "island 2 freeze at instruction BACKWARD of step 2",
    "island 0 freeze at exchange 1",
    "island 1 freeze within exchange 1",
    "island 1 freeze for 1.5 s at exchange 1",
    "island 3 join at step 3, island 1 freeze while healing",
    "island 3 join at step 3, island 3 freeze while healing",
    "island 1 cut at step 2",
    "island 2 cut at exchange 1",
    "island 0 cut within exchange 1",
    "island 1 cut for 1.5 s within exchange 1",
    "island 1 rank 0 cut within exchange 1",  # it reaches the meeting place, but not the others
    "island 3 join at step 3, island 3 cut while healing",
    "island 1 slow x200 for 6 s at step 2",
    "island 0 slow x20 for 2 s within exchange 1",
    "island 2 slow x3 at step 1",
]
COMES_BACK = [
    "island 2 freeze for 6 s at step 2",
    "island 1 freeze for 6 s within exchange 1",
    "island 1 cut for 6 s at exchange 1",
    "island 2 cut for 6 s within exchange 1",
]
IN_ORDER = [
    "island 1 leave at step 2",
    "island 0 leave at exchange 1",
    "island 2 leave within exchange 1",
    "island 3 join at step 3, island 1 leave while healing",
    "island 3 join at step 2",
    "island 3 join at exchange 2, island 4 join at exchange 2",
    "meet kill within exchange 1",
    "meet kill at exchange 1",
    "meet kill for 5 s at step 2",
    "meet freeze for 6 s within exchange 1",
    "island 3 join at step 2, meet kill while healing",
]
OF_RANKS = [
    "island 1 rank 1 kill within exchange 1",
    "island 1 rank 0 kill at instruction REDUCE of step 2",
    "island 2 join at step 2, island 0 rank 1 kill while healing",
]
# Of three, since two islands that do not reach each other have no third to say which of them is cut off.
OF_RANKS_OF_THREE = ["island 0 rank 1 cut within exchange 1"]


def check(folder: Path, texts: str, num_islands: int, ranks: int = 1, steps: int = 5) -> None:
    seen, found = rehearse(folder, num_islands, texts.split(", "), ranks, steps)
    print("\n".join(picture(seen)))
    for each in found.found:
        print(f"FOUND {each.fault.text}: lost {each.lost}; waited {each.waited_s}")
    print(f"FOUND left {found.num_left}, healing {found.healing}, slower {found.slower:+.3f}")
    assert not found.wrong
    assert (found.num_steps_lost, found.num_left) == (0, 0)
    # No environment of somebody else's harms a run in silence.
    own = "TERRACE_FAULTS is set: this run is part of a rehearsal, with the faults: "
    for ran in seen.ran:
        assert own in ran.output.read_text()
    of_lost = {entry.island for _, entry in seen.entries if isinstance(entry, Gone) and entry.first >= 0}
    assert of_lost <= {str(each.island) for each in seen.faults}
    named = {str(each.fault.island) for each in found.found if each.lost != "nothing"}
    assert named == of_lost
    finals = [masters(ran.folder, steps) for ran in seen.ran if ran.code == 0 and folder_of(ran.folder, steps).is_dir()]
    assert finals
    for name, value in finals[0].items():
        assert all(torch.equal(value, each[name]) for each in finals)


def masters(folder: Path, steps: int) -> dict[str, Tensor]:
    return {key: value for key, value in contents(folder_of(folder, steps)).items() if "/master" in key}


@pytest.mark.parametrize("texts", BY_DAY)
def test_the_others_lose_nothing_to_a_fault(tmp_path: Path, texts: str) -> None:
    check(tmp_path, texts, 2, steps=3)


@pytest.mark.parametrize("texts", nightly(*KILLS, *STANDS, *IN_ORDER))
def test_the_others_lose_nothing_to_any_fault(tmp_path: Path, texts: str) -> None:
    check(tmp_path, texts, 3)


@pytest.mark.parametrize("texts", nightly(*COMES_BACK))
def test_an_island_that_was_lost_comes_back(tmp_path: Path, texts: str) -> None:
    check(tmp_path, texts, 3, steps=60)


@pytest.mark.parametrize("texts", nightly(*OF_RANKS_OF_THREE))
def test_an_island_with_a_rank_that_is_cut_off_is_lost(tmp_path: Path, texts: str) -> None:
    check(tmp_path, texts, 3, ranks=2)


@pytest.mark.parametrize("texts", nightly(*OF_RANKS))
def test_a_rank_of_an_island_takes_no_other_island_with_it(tmp_path: Path, texts: str) -> None:
    check(tmp_path, texts, 2, ranks=2)


@pytest.mark.parametrize(
    "texts",
    nightly(
        "rank 1 kill at step 4",
        "rank 0 kill at instruction BACKWARD of step 2",
        "rank 1 freeze at step 4",
        "rank 0 slow x3 at step 2, rank 1 kill at step 3, rank 0 kill at step 5",
    ),
)
def test_a_run_without_islands_ends_and_goes_on_from_its_checkpoint(tmp_path: Path, texts: str) -> None:
    restarts = rehearse_restarts(tmp_path, texts.split(", "))
    assert not restarts.wrong
    num_ends = sum("slow" not in text for text in texts.split(", "))
    assert [bool(life.code) for life in restarts.lives] == [True] * num_ends + [False]
    assert all(life.num_left == 0 for life in restarts.lives)
    assert all(0 < life.first_step <= 5 for life in restarts.lives)
    undisturbed = rehearse_restarts(tmp_path / "undisturbed", ())
    assert len(undisturbed.lives) == 1
    assert losses(tmp_path / "out" / "run") == losses(tmp_path / "undisturbed" / "out" / "run")


@pytest.mark.nightly
def test_a_newcomer_of_a_roster_that_is_dead_is_refused_in_one_line(tmp_path: Path) -> None:
    texts = "island 2 join at step 3, island 0 kill at step 3, island 1 kill at step 3"
    seen, found = rehearse(tmp_path, 2, texts.split(", "))
    assert not seen.is_finished
    (newcomer,) = [ran for ran in seen.ran if ran.island == 2]
    assert newcomer.code == 2
    waited_s = newcomer.end_s - seen.done[1]
    assert 6 * found.patience_s <= waited_s <= 6 * found.patience_s + 15.0
    assert found.num_left == 0


@pytest.mark.nightly
def test_an_island_that_wakes_after_the_run_is_finished_saves_no_checkpoint(tmp_path: Path) -> None:
    seen, found = rehearse(tmp_path, 2, ["island 1 freeze for 6 s at step 2"], steps=3)
    assert not found.wrong
    awake, asleep = sorted(seen.ran, key=lambda ran: ran.island)
    assert awake.code == 0
    assert asleep.code == 1
    assert folder_of(awake.folder, 3).is_dir()
    assert not folder_of(asleep.folder, 3).is_dir()
