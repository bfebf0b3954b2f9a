"""A thread that makes the batches of the next steps while the current one runs.

Steps are made in order, at most `depth` ahead, so memory is bounded. An error in the thread is raised by `next` at the
step it belongs to. The thread is a daemon, so it never keeps a process alive, and `close` ends it at once. It touches
no device except to pin host memory.
"""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

DEPTH = 2
MADE_AHEAD = DEPTH + 1  # steps behind the one that runs that may be made already: one waits in the thread
_LEAVE_S = 5.0
_POLL_S = 0.1  # how long a closed feeder's thread may linger when its queue is full


class Feeder(Generic[T]):
    """Calls `make(step)` ahead of time, in a thread, for every step from `first` up to `end`."""

    def __init__(self, make: Callable[[int], T], first: int, end: int, depth: int = DEPTH) -> None:
        assert depth >= 1, f"depth {depth}"
        self._make = make
        self._made: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._closed = threading.Event()
        self._left = max(0, end - first)
        self._thread = threading.Thread(target=self._run, args=(first, end), name="feeder", daemon=True)
        self._thread.start()

    def next(self) -> T:
        """The batches of the next step; waits for them if necessary. Raises the error raised by `make`."""
        assert self._left > 0, "no step is left to feed"
        value, error = self._made.get()
        # No further step is made after an error.
        if error is not None:
            self._left = 0
            raise error
        self._left -= 1
        return value  # type: ignore[return-value]  # set unless there is an error

    def close(self) -> None:
        """Ends the thread and drops prepared steps, without waiting for a read that hangs. May be called twice."""
        self._closed.set()
        self._thread.join(_LEAVE_S)

    def _run(self, first: int, end: int) -> None:
        for step in range(first, end):
            try:
                made: tuple[T | None, BaseException | None] = (self._make(step), None)
            except BaseException as error:  # raised in the step that needs the batch
                made = (None, error)
            # Closed meanwhile, or an error: nothing more to make.
            if not self._put(made) or made[1] is not None:
                return

    def _put(self, made: tuple[T | None, BaseException | None]) -> bool:
        # Polling lets `close` end the thread while the queue is full.
        while not self._closed.is_set():
            try:
                self._made.put(made, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
