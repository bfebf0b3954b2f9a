"""Sequences that repeat: a beginning, a body that comes again some micro-batches later each time, and an end.

The order of a long step is kept in this form, so that it takes the time and the memory of a short one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar, overload


class OfMicros(Protocol):
    """A value that names micro-batches, if any."""

    def later(self, micros: int) -> Self:
        """The same value that many micro-batches later."""


T = TypeVar("T", bound=OfMicros)


@dataclass(frozen=True)
class Repeated(Sequence[T]):
    """`prefix`, then `body` `repeats` times, each time `every` micro-batches later, then `suffix`."""

    prefix: tuple[T, ...]
    body: tuple[T, ...]
    suffix: tuple[T, ...]  # as it follows the last body
    repeats: int
    every: int

    def times(self, repeats: int) -> "Repeated[T]":
        """The same sequence with another number of bodies."""
        by = (repeats - self.repeats) * self.every
        return replace(self, suffix=tuple(item.later(by) for item in self.suffix), repeats=repeats)

    def __len__(self) -> int:
        return len(self.prefix) + self.repeats * len(self.body) + len(self.suffix)

    def __iter__(self) -> Iterator[T]:
        yield from self.prefix
        for number in range(self.repeats):
            by = number * self.every
            for item in self.body:
                yield item.later(by)
        yield from self.suffix

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        if isinstance(index, slice):
            return tuple(self[each] for each in range(*index.indices(len(self))))
        # A range raises IndexError and counts negative indexes from the end.
        behind = range(len(self))[index] - len(self.prefix)
        if behind < 0:
            return self.prefix[behind]
        number, place = divmod(behind, len(self.body))
        if number < self.repeats:
            return self.body[place].later(number * self.every)
        return self.suffix[behind - self.repeats * len(self.body)]


def repeated(steps: Sequence[Sequence[T]], every: int) -> Repeated[T] | None:
    """The repeated sequence that three `steps` have in common, None if there is none.

    Each of the steps is `every` micro-batches longer than the one before, by one body. The sequence returned has one
    body, behind the shortest prefix.
    """
    short, long, longer = steps
    size = len(long) - len(short)
    begin = next((at for at, pair in enumerate(zip(short, long, strict=False)) if pair[0] != pair[1]), len(short))
    end = 0
    while end < len(short) and short[-1 - end].later(every) == long[-1 - end]:
        end += 1
    first = len(short) - end
    if size <= 0 or begin < first:
        return None
    found = Repeated(tuple(long[:first]), tuple(long[first : first + size]), tuple(long[first + size :]), 1, every)
    return found if tuple(found.times(2)) == tuple(longer) else None
