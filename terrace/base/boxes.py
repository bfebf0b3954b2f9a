"""Boxes: rectangular parts of arrays, in which parameters are stored and transferred. Pure arithmetic.

A box has one range per dim; the box of a scalar is empty. A row-major range of elements [start, stop) consists of the
end of a row, whole rows and the beginning of a row, recursively: at most 2n - 1 boxes for n dims.
"""

import math
from collections.abc import Iterator, Sequence

_MOST_DIMS = 8

Box = tuple[tuple[int, int], ...]  # (start, stop) on each dim


def whole(shape: Sequence[int]) -> Box:
    return tuple((0, size) for size in shape)


def sizes(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


def numel(box: Box) -> int:
    """Number of elements; 1 for a scalar."""
    return math.prod(sizes(box))


def shifted(box: Box, offsets: Sequence[int]) -> Box:
    return tuple((start + offset, stop + offset) for (start, stop), offset in zip(box, offsets, strict=True))


def overlap(one: Box, other: Box) -> Box | None:
    """Intersection of two boxes of one array; None if empty."""
    common = tuple((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return common if all(start < stop for start, stop in common) else None


def within(box: Box, outer: Box) -> tuple[slice, ...]:
    """Slices of `box` in an array that has the elements of `outer`; `outer` must contain `box`."""
    return tuple(slice(start - base, stop - base) for (start, stop), (base, _) in zip(box, outer, strict=True))


def cut(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Boxes that partition elements [start, stop) of a row-major array, in order."""
    if start >= stop:
        return
    if not shape:
        yield ()
        return
    rest = tuple(shape[1:])
    row = math.prod(rest)
    (first, head), (last, tail) = divmod(start, row), divmod(stop, row)
    # The range lies within one row of the outermost dim.
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
    """A part of `box` that none of `others` covers, or None if it is fully covered.

    Splits recursively around the middle box of `others`: if they are sorted, each split halves their number.
    """
    left = [(box, others)]
    while left:
        part, candidates = left.pop()
        if not numel(part):
            continue
        # Only boxes that overlap this part are passed on, so the lists shrink quickly.
        inside = [common for other in candidates if (common := overlap(part, other)) is not None]
        if not inside:
            return part
        left += [(rest, inside) for rest in _around(part, inside[len(inside) // 2])]
    return None


def to_text(box: Box) -> str:
    """A box in Python's notation, "0:4,8:16"; empty for a scalar."""
    return ",".join(f"{start}:{stop}" for start, stop in box)


def from_text(text: str) -> Box:
    """Inverse of `to_text`. Raises `ValueError` for malformed text and for more than 8 dims.

    The limit bounds the time of `uncovered`, which is exponential in the number of dims.
    """
    ranges, parts = [], text.split(",") if text else []
    if len(parts) > _MOST_DIMS:
        raise ValueError(f"a box has {len(parts)} dims")
    for part in parts:
        start, stop = part.split(":")
        ranges.append((int(start), int(stop)))
    return tuple(ranges)


def _around(box: Box, hole: Box) -> Iterator[Box]:
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        # Dims before this one are cut to the hole, so the parts do not overlap.
        yield (*hole[:dim], (start, first), *box[dim + 1 :])
        yield (*hole[:dim], (last, stop), *box[dim + 1 :])
