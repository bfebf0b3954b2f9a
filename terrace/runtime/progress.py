"""The callback that a watchdog follows a rank by."""

from typing import Protocol


class Progress(Protocol):
    """Called with the instruction that a rank is at; `waiting_on` holds the ranks it waits for, itself included."""

    def __call__(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None: ...


def no_progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
    """No-op progress callback."""
