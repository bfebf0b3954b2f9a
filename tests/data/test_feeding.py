"""The thread that makes batches ahead: in order, bounded, with its errors where they belong."""

import threading
import time
from collections.abc import Callable

import pytest

from terrace.base.errors import DataError
from terrace.data.feeding import Feeder


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def test_steps_come_in_order_and_at_most_so_many_ahead() -> None:
    made: list[int] = []

    def make(step: int) -> int:
        made.append(step)
        return step

    feeder = Feeder(make, 3, 20, depth=2)
    wait_for(lambda: len(made) >= 3)
    time.sleep(0.05)
    assert made == [3, 4, 5]  # two lie ready, one waits to be handed on
    assert [feeder.next() for _ in range(17)] == list(range(3, 20))
    feeder.close()
    with pytest.raises(AssertionError, match="no step is left"):
        feeder.next()


def test_an_error_comes_up_in_its_step() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise DataError("the disk is gone")
        return step

    feeder = Feeder(make, 0, 10)
    assert [feeder.next(), feeder.next()] == [0, 1]
    with pytest.raises(DataError, match="the disk is gone"):
        feeder.next()
    feeder.close()


def test_closing_ends_the_thread_however_full_it_is() -> None:
    before = threading.active_count()
    feeder = Feeder(lambda step: step, 0, 10**9, depth=1)
    wait_for(lambda: threading.active_count() > before)
    feeder.close()
    feeder.close()
    assert threading.active_count() == before
    Feeder(lambda step: step, 5, 5).close()


def test_the_next_step_is_made_while_this_one_runs() -> None:
    made: list[int] = []
    feeder = Feeder(lambda step: made.append(step), 0, 5, depth=1)
    feeder.next()
    wait_for(lambda: 1 in made)  # nobody has asked for it
    feeder.close()
    assert made[:2] == [0, 1]
