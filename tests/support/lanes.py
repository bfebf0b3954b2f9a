"""Lanes without a thread, for the extremes of chance.

When a lane's thread gets to run is up to the machine. `EagerLane` runs work when it is submitted,
`LazyLane` not before somebody waits for it, so a wait that an instruction forgets always shows.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from terrace.comm.lane import Lane, ThreadLane, Ticket
from terrace.runtime import comm as comm_module

Work = Callable[[], None]


class EagerLane(Lane):
    """Runs work at once."""

    def submit(self, work: Work) -> Ticket:
        with torch.no_grad():
            work()
        return _Done()

    def close(self, wait: bool = True) -> None:
        pass


class _Done(Ticket):
    is_done = True

    def wait(self) -> None:
        pass


class LazyLane(Lane):
    """Runs work, in order, when something submitted at or after it is waited for."""

    def __init__(self) -> None:
        self.queue: deque[tuple[Ticket, Work]] = deque()

    def submit(self, work: Work) -> Ticket:
        ticket = _Lazy(self)
        self.queue.append((ticket, work))
        return ticket

    def close(self, wait: bool = True) -> None:
        pass


class _Lazy(Ticket):
    def __init__(self, lane: LazyLane) -> None:
        self.lane = lane

    @property
    def is_done(self) -> bool:
        return all(ticket is not self for ticket, _ in self.lane.queue)

    def wait(self) -> None:
        while any(ticket is self for ticket, _ in self.lane.queue):
            _, work = self.lane.queue.popleft()
            with torch.no_grad():
                work()
            del work


LANES: dict[str, Callable[[], Lane]] = {"eager": EagerLane, "lazy": LazyLane, "thread": ThreadLane}


@contextmanager
def use_lane(name: str) -> Iterator[None]:
    """Give the engines made inside the lane of this name."""
    patched: Any = comm_module
    original = patched.make_lane
    patched.make_lane = lambda device: LANES[name]()
    try:
        yield
    finally:
        patched.make_lane = original
