"""Queue of message parts that wait for gaps (terrace.plan.gaps), shared by verifier, simulator and runtime.

Part 0 of a REDUCE or SYNC in gaps is sent where it is issued, part g in gap g of the backward that follows.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Messages with unsent parts, in the order of issue."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[T, int, int]] = []  # (message, next part, number of parts)

    def hold(self, message: T, num_parts: int) -> None:
        """Queue a message; `due` returns its parts."""
        self._waiting.append((message, 0, num_parts))

    def due(self, gap: int) -> list[tuple[T, int]]:
        """Remove and return the unsent (message, part) pairs up to gap `gap`, in sending order."""
        waiting = self._waiting
        self._waiting = [(message, gap + 1, parts) for message, _, parts in waiting if parts > gap + 1]
        return [
            (message, part)
            for part in range(min((left for _, left, _ in waiting), default=gap), gap + 1)
            for message, left, parts in waiting
            if left <= part < parts
        ]

    def rest(self) -> list[tuple[T, int]]:
        """Remove and return all unsent parts."""
        return self.due(max((parts for _, _, parts in self._waiting), default=0))
