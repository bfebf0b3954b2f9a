"""Ranks whose heartbeats stop, by the readings of one clock."""

import pytest

from terrace.launch.heartbeats import Position, Stillness
from terrace.launch.postmortem import Heartbeat
from terrace.launch.silence import Silence


def beats(*numbers: int, state: str = "idle") -> list[Heartbeat]:
    return [Heartbeat(rank=rank, number=number, state=state) for rank, number in enumerate(numbers)]  # type: ignore[arg-type]


def test_a_rank_is_silent_once_its_heartbeats_have_stopped_for_the_limit() -> None:
    silence = Silence(5.0)
    assert not silence.look(beats(1, 1), 100.0)
    assert not silence.look(beats(2, 1), 104.9)
    assert silence.look(beats(3, 1), 105.0)
    assert not silence.look(beats(4, 2), 106.0)
    assert not silence.look(beats(5, 3), 120.0)  # nobody looked meanwhile


def test_ranks_that_have_left_or_have_not_come_are_not_silent() -> None:
    silence = Silence(5.0)
    for state in ("left", "failed", "dragged", "absent"):
        for now_s in (0.0, 10.0, 20.0):
            assert not silence.look(beats(7, state=state), now_s)


def test_a_process_that_was_suspended_has_not_stood_still_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 100.5, 400.0, 400.5])
    monkeypatch.setattr("terrace.launch.heartbeats.time.monotonic", lambda: next(clock))
    position = Position(step=3, counter=7, doing="a gather", ranks=(1,), extra_s=0.0)
    stillness = Stillness(position, 2.0)
    assert [stillness.look(position) for _ in range(3)] == [0.5, 2.0, 0.5]
    assert stillness.seconds == 3.0
