"""A time limit for a piece of this process, which need not return by itself."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooLate(BaseException):
    """A piece of work took longer than it may. No `Exception`: no handler on the way may take it for another error."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raises `TooLate` in the main thread after `seconds`."""

    def end(*_: object) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
