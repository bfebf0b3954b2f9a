"""The callback through which a watchdog follows a rank."""

from typing import Protocol


class Progress(Protocol):
    """Called with a rank's current instruction; `waiting_on` are the ranks of the message it waits for."""

    def __call__(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None: ...


def no_progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
    """No-op progress callback."""
