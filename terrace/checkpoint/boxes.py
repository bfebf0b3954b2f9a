"""Boxes: the parts of arrays that a checkpoint is made of. Pure arithmetic.

A box has a range on every dim, so the box of a scalar has none. Elements [start, stop) of an array in row-major order
are the end of a row, whole rows and the beginning of a row, and so on inside a row: 2n - 1 boxes at most for n dims.
"""

import math
from collections.abc import Iterator, Sequence

Box = tuple[tuple[int, int], ...]  # (start, stop) on each dim


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole array."""
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Number of elements; 1 for a scalar."""
    return math.prod(sizes(box))


def shifted(box: Box, offsets: Sequence[int]) -> Box:
    """The box moved by an offset on each dim."""
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """The intersection of two boxes of one array; None if it is empty."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """The index of `box` in an array that holds the elements of `outer`, a box around it."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def cut(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield the boxes of elements [start, stop) of an array, in order: each holds the elements that follow."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    rest = tuple(shape[1:])
    row = math.prod(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    if first == last:
        yield from (((first, first + 1), *box) for box in cut(rest, head, tail))
        return
    if head:
        yield from (((first, first + 1), *box) for box in cut(rest, head, row))
        first += 1
    if first < last:
        yield ((first, last), *whole(rest))
    yield from (((last, last + 1), *box) for box in cut(rest, 0, tail))


def uncovered(box: Box, others: Sequence[Box]) -> Box | None:
    """A part of `box` that none of the others covers, or None when all of it is covered.

    Splits around the middle one of the others: when they are sorted, their number halves with every split.
    """
    left = [(box, others)]
    while left:
        part, candidates = left.pop()
        if not numel(part):
            continue
        inside = [common for other in candidates if (common := overlap(part, other)) is not None]
        if not inside:
            return part
        left += [(rest, inside) for rest in _around(part, inside[len(inside) // 2])]
    return None


def to_text(box: Box) -> str:
    """A box in Python's notation, "0:4,8:16"; the empty text for a scalar."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def from_text(text: str) -> Box:
    """Read `to_text` back; raises `ValueError` for anything else."""
    ranges = []
    for part in text.split(",") if text else []:
        start, stop = part.split(":")
        ranges.append((int(start), int(stop)))
    return tuple(ranges)


def _around(box: Box, hole: Box) -> Iterator[Box]:
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        yield (*hole[:dim], (start, first), *box[dim + 1 :])
        yield (*hole[:dim], (last, stop), *box[dim + 1 :])
