"""Threads of lanes end with their lane, closed or not."""

import gc
import threading
import time
import weakref

import pytest

from terrace.comm.lane import ThreadLane


class Engine:
    """Holds a lane and works on it, as an engine does."""

    def __init__(self) -> None:
        self.lane = ThreadLane()

    def fail(self) -> None:
        raise ValueError("the group is gone")


def lanes() -> int:
    return sum(thread.name == "terrace-lane" for thread in threading.enumerate())


@pytest.mark.parametrize("fails", [False, True])
def test_the_thread_of_a_lane_that_nobody_closed_ends(fails: bool) -> None:
    """The traceback of an error, too, holds no lane: pools of ranks would gather groups from test to test."""
    before = lanes()
    lane = ThreadLane()
    engine = Engine()
    done = lane.submit(engine.fail if fails else lambda: None)
    if fails:
        with pytest.raises(ValueError, match="the group is gone"):
            done.wait()
    else:
        done.wait()
    assert lanes() == before + 2
    gone = weakref.ref(engine)
    del lane, engine, done
    deadline = time.monotonic() + 10
    while lanes() > before and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    gc.collect()
    assert (lanes(), gone()) == (before, None)


def test_work_after_an_error_fails_with_it() -> None:
    lane, made = ThreadLane(), []
    lane.submit(Engine().fail)
    later = lane.submit(lambda: made.append(1))
    with pytest.raises(ValueError, match="the group is gone"):
        later.wait()
    assert lane.failed
    assert made == []
    lane.close()
