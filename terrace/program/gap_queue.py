"""Parts of messages that wait for gaps (terrace.plan.gaps): one rule for verifier, simulator and runtime.

A REDUCE or a SYNC in gaps leaves part by part, part 0 where it is issued and part g in gap g of the backward behind it.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Messages with parts that have not left, in the order in which they were issued."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[tuple[T, int, int]] = []  # message, its next part, number of its parts

    def hold(self, message: T, num_parts: int) -> None:
        """Take a message, whose parts leave when they are `due`."""
        self._waiting.append((message, 0, num_parts))

    def due(self, gap: int) -> list[tuple[T, int]]:
        """(Message, part) of gap `gap` and of the gaps before it, in the order in which they leave."""
        waiting = self._waiting
        self._waiting = [(message, gap + 1, parts) for message, _, parts in waiting if parts > gap + 1]
        return [
            (message, part)
            for part in range(min((left for _, left, _ in waiting), default=gap), gap + 1)
            for message, left, parts in waiting
            if left <= part < parts
        ]

    def rest(self) -> list[tuple[T, int]]:
        """All that is left."""
        return self.due(max((parts for _, _, parts in self._waiting), default=0))
