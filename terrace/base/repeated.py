"""Compressed sequences: a prefix, a body that repeats with its micro-batch indices shifted each time, and a suffix.

The order of a long step is stored in this form, so that it needs only the time and memory of a short one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self, TypeVar, overload


class OfMicros(Protocol):
    """A value that may refer to micro-batches."""

    def later(self, micros: int) -> Self:
        """This value with its micro-batch indices increased by `micros`."""


T = TypeVar("T", bound=OfMicros)


@dataclass(frozen=True)
class Repeated(Sequence[T]):
    """`prefix`, then `repeats` copies of `body`, each `every` micro-batches after the one before, then `suffix`."""

    prefix: tuple[T, ...]
    body: tuple[T, ...]
    suffix: tuple[T, ...]  # with the micro-batch indices that follow the last body
    repeats: int
    every: int

    def times(self, repeats: int) -> "Repeated[T]":
        """This sequence with another number of repeats; the suffix is shifted accordingly."""
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
    """Find the repeated form of three `steps`, each `every` micro-batches (one body) longer than the one before.

    Returns it with one repeat and the shortest possible prefix, or None if the steps do not have this form.
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
