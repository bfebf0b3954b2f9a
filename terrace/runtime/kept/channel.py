"""A medium below the device of one rank: its store, a lane of reads and one of writes, and their counters and timers.

All states on a medium share its lanes, so reads run in the order in which they were submitted, and so do writes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from terrace.comm.lane import ThreadLane
from terrace.comm.ledger import Ledger
from terrace.comm.pace import Pace, lane_below
from terrace.plan.wire import MessageClass

Work = Callable[[], None]
Around = Callable[[Work, str, str], Work]  # (work, its category, medium or host's cores) -> work that does the same


class Store(Protocol):
    """The pieces on a medium. One thread may call `read` while another calls `write`."""

    @property
    def sizes(self) -> Sequence[int]:
        """Bytes of every piece."""

    def read(self, number: int, memory: memoryview) -> None:
        """Fill `memory` with a piece."""

    def write(self, number: int, memory: memoryview) -> None:
        """Store a piece."""

    def close(self) -> None:
        """Free the room of all pieces."""


class Paced(Store):
    """A `store` on `medium` whose calls take at least as long as `pace` says."""

    def __init__(self, store: Store, medium: str, pace: Pace) -> None:
        self._store, self._pace = store, pace
        self._reads = lane_below(MessageClass.KEEP_READ, medium)
        self._writes = lane_below(MessageClass.KEEP_WRITE, medium)

    @property
    def sizes(self) -> Sequence[int]:
        return self._store.sizes

    def read(self, number: int, memory: memoryview) -> None:
        with self._pace(self._reads, self.sizes[number]):
            self._store.read(number, memory)

    def write(self, number: int, memory: memoryview) -> None:
        with self._pace(self._writes, self.sizes[number]):
            self._store.write(number, memory)

    def close(self) -> None:
        self._store.close()


def _nothing() -> None:
    """Do nothing."""


def untimed(work: Work, category: str, lane: str) -> Work:
    return work


class Channel:
    """The store of `medium`, and the lanes on which its pieces are read and written. `ledger` counts bytes."""

    def __init__(self, store: Store, ledger: Ledger, medium: str) -> None:
        self.store, self.medium, self._ledger = store, medium, ledger
        self.reader, self.writer = ThreadLane(), ThreadLane()
        self.on_piece: Work = _nothing  # called at each piece of an update, so that a watchdog sees progress
        self.around: Around = untimed  # wraps the work of both lanes; a recording of a step sets it

    def timed(self, work: Work, message: MessageClass) -> Work:
        """The work of a lane, timed while a step is recorded."""
        return self.around(work, message.value, self.medium)

    def count(self, message: MessageClass, num_bytes: int) -> None:
        self._ledger.add(message, self.medium, num_bytes)

    def stop(self) -> None:
        failed = self.reader.failed or self.writer.failed
        self.reader.close(wait=not failed)
        self.writer.close(wait=not failed)

    def close(self) -> None:
        """Stop the lanes, and free the room on the medium."""
        self.stop()
        self.store.close()
