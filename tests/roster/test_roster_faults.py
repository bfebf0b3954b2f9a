"""Islands with real connections and a toy of a model: faults, and a replay of the log in one process."""

import resource
import threading
from pathlib import Path

import numpy as np
import pytest

from terrace.base.errors import TrainingError
from terrace.roster.entries import Attempted, Committed, Dealt, Gone, Terms
from terrace.roster.place import Log, read_log
from tests.support.nightly import nightly
from tests.support.roster_islands import (
    LR,
    MOMENTUM,
    NUMEL,
    Fault,
    Meeting,
    Ran,
    history,
    initial,
    run_all,
    run_island,
    trained,
)
from tests.support.roster_replay import Replayed, replayed

TERMS = Terms(every=2, steps=10, rounds=6, patience_s=4.0)
STATE_BYTES = 2 * NUMEL * 8


def sums_bytes(numel: int, element_bytes: int, place: int, num_islands: int) -> int:
    """Bytes that island `place` of n sends for the sums of `numel` elements."""
    own = _numel(numel, place, num_islands)
    return element_bytes * ((numel - own) + (num_islands - 1) * own)


def healing_bytes(numel: int, element_bytes: int, place: int, num_holders: int) -> int:
    """Bytes that holder `place` sends to each island that is healed; `numel` elements of anchor and momentum."""
    return element_bytes * _numel(numel, place, num_holders)


def _numel(numel: int, place: int, num: int) -> int:
    return numel * (place + 1) // num - numel * place // num


def replay(log: Path) -> Replayed:
    return replayed(log.read_text().splitlines(), initial(), trained, LR, MOMENTUM)


def check(log: Path, found: dict[str, Ran], expected_to_end: set[str]) -> Replayed:
    """Survivors have the same bits, and the replay has their numbers; every row is trained on once or counted."""
    again = replay(log)
    newest = max(again.anchors)
    ended = {name: ran for name, ran in found.items() if ran.error is None}
    assert expected_to_end <= set(ended)
    finals = [ended[name].anchor for name in sorted(expected_to_end)]
    for final in finals:
        assert final.tobytes() == finals[0].tobytes()
        np.testing.assert_allclose(final, again.anchors[newest], rtol=0, atol=1e-10)
    dealt = {
        (name, entry.first, entry.last) for entry in read_log(log) if isinstance(entry, Dealt) for name in entry.shares
    }
    assert len(again.taken) + len(again.lost) == len(dealt)
    assert {*again.taken, *again.lost} == dealt
    return again


def test_islands_without_a_fault_train_every_row_and_send_what_the_formula_says(tmp_path: Path) -> None:
    log = tmp_path / "roster.jsonl"
    found, _ = run_all(log, TERMS, {"a": (), "b": (), "c": ()}, {}, 3, 0.0)
    again = check(log, found, {"a", "b", "c"})
    assert not again.lost
    for place, name in enumerate("abc"):
        assert found[name].sent_bytes == 5 * sums_bytes(NUMEL, 8, place, 3)
        assert [deal.shares[name] for deal in found[name].windows] == [2] * 5


BY_DAY = [("kill", False, 0.0), ("kill", True, 0.0), ("cut", True, 0.0), ("leave", False, 0.0)]
BY_NIGHT = [("freeze", False, 6.0), ("freeze", True, 6.0), ("slow", False, 5.0)]


@pytest.mark.parametrize("window", [0, *nightly(2)])
@pytest.mark.parametrize(
    ("kind", "in_exchange", "seconds"),
    [*BY_DAY, *nightly(*BY_NIGHT)],
)
def test_survivors_of_a_fault_lose_no_step_and_wait_no_longer_than_patience(
    tmp_path: Path, kind: str, in_exchange: bool, seconds: float, window: int
) -> None:
    log = tmp_path / "roster.jsonl"
    fault = Fault(kind=kind, window=window, in_exchange=in_exchange, seconds=seconds)
    found, _ = run_all(log, TERMS, {"a": (), "b": (fault,), "c": ()}, {}, 3, 0.1)
    again = check(log, found, {"a", "c"})
    error = found["b"].error  # of the fault alone
    words = {
        "kill": "KilledError",
        "freeze": "finished the run without this island",
    }  # if it wakes too late
    assert error is None or (kind in words and words[kind] in repr(error)), error
    lost = {name for name, _, _ in again.lost}
    assert lost == ({"b"} if kind in ("kill", "freeze") else set())
    if kind == "slow":
        # It misses exchanges, and one of those behind them takes all that it trained.
        tries = [entry for entry in read_log(log) if isinstance(entry, Attempted)]
        assert any("b" in entry.missed and entry.exchange == window for entry in tries)
        assert any(entry.islands["b"].window == window < entry.exchange for entry in tries if "b" in entry.islands)
    for name in "ac":
        assert max(found[name].waits_s) <= TERMS.patience_s + 1.0
        dealt = [entry.window for entry in read_log(log) if isinstance(entry, Dealt) and name in entry.shares]
        assert [deal.window for deal in found[name].windows] == dealt
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("roster exchange")]


def test_a_newcomer_is_healed_by_all_with_each_byte_once(tmp_path: Path) -> None:
    log = tmp_path / "roster.jsonl"
    found, _ = run_all(log, TERMS, {"a": (), "b": (), "z": ()}, {"z": 0.7}, 2, 0.35)
    check(log, found, {"a", "b", "z"})
    healings = sum(1 for deal in found["z"].windows[:1])
    assert healings == 1
    assert sum(healing_bytes(2 * NUMEL, 8, place, 2) for place in range(2)) == STATE_BYTES
    num = {size: sum(1 for commit in commits(log) if len(commit) == size) for size in (2, 3)}
    for place, name in enumerate("ab"):
        sums = num[2] * sums_bytes(NUMEL, 8, place, 2) + num[3] * sums_bytes(NUMEL, 8, place, 3)
        assert found[name].sent_bytes == sums + healing_bytes(2 * NUMEL, 8, place, 2)


def commits(log: Path) -> list[list[str]]:
    """The islands of every exchange."""
    found, attempt = [], list[str]()
    for entry in read_log(log):
        if isinstance(entry, Committed):
            found.append(attempt)
        elif hasattr(entry, "islands"):
            attempt = list(entry.islands)
    return found


def test_the_meeting_place_may_die_and_come_back(tmp_path: Path) -> None:
    log = tmp_path / "roster.jsonl"
    meeting, found = Meeting(log, 2), dict[str, Ran]()

    def run(name: str) -> None:
        found[name] = run_island(name, meeting.port, TERMS, pace_s=0.2)

    threads = [threading.Thread(target=run, args=(name,), daemon=True) for name in "ab"]
    for thread in threads:
        thread.start()
    for _ in range(3):
        threads[0].join(0.25)
        meeting.die()
        threads[0].join(0.2)
        with log.open("ab") as file:
            file.write(b'{"kind": "comm')  # killed in a write
        meeting.begin()
    for thread in threads:
        thread.join(60.0)
    check(log, found, {"a", "b"})
    assert not [entry for entry in read_log(log) if isinstance(entry, Gone)]
    assert len(commits(log)) == 5


def test_a_full_disk_ends_the_meeting_place_and_leaves_no_line_twice(tmp_path: Path) -> None:
    log = Log(tmp_path / "roster.jsonl")
    log.write((Committed(exchange=0, attempt=0),))
    before, limits = log.path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    room = len(before) * 3 // 2  # for the first of two lines, but not for both
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(TrainingError, match=r"cannot write .*: File too large; make room, then start terrace meet"):
            log.write((Committed(exchange=1, attempt=0), Committed(exchange=2, attempt=0)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert log.path.read_bytes() == before
    log.write((Committed(exchange=1, attempt=0),))
    log.close()
    assert read_log(log.path) == [Committed(exchange=0, attempt=0), Committed(exchange=1, attempt=0)]


@pytest.mark.parametrize("seed", [0, *nightly(*range(1, 20))])
def test_a_random_history_replays_to_the_same_numbers(tmp_path: Path, seed: int) -> None:
    log = tmp_path / "roster.jsonl"
    faults, late_s = history(seed)
    wait_for = 1 + sum(not late for late in late_s.values())
    found, _ = run_all(log, TERMS, faults, late_s, wait_for, 0.2)
    check(log, found, {"a"})
