"""Overlays labelled boxes of one array: disjoint cells, each with the labels of all boxes that contain it.

A label is a bit set, for example the ranks that hold a box. The first dim is split into slabs at the bounds of all
boxes, and each slab is split recursively along the remaining dims. Adjacent slabs with equal contents are merged. Few
boxes of row-major ranges (`terrace.base.boxes.cut`) share a slab, so there are about as many cells as boxes.
"""

from collections.abc import Iterable
from itertools import pairwise

from terrace.base.boxes import Box, numel

Labelled = dict[Box, int]


def overlay(boxes: Iterable[tuple[Box, int]]) -> list[tuple[Box, int]]:
    """Split `boxes` into disjoint cells, sorted, each with the union (bitwise or) of the labels that cover it."""
    found: Labelled = {}
    for box, label in boxes:
        if numel(box):
            found[box] = found.get(box, 0) | label
    return _cells(found)


def _cells(boxes: Labelled) -> list[tuple[Box, int]]:
    # At most one box is left; this includes scalars and slabs without remaining dims.
    if len(boxes) < 2:
        return list(boxes.items())
    return [((slab, *rest), label) for slab, inside in _slabs(boxes) for rest, label in _cells(inside)]


def _slabs(boxes: Labelled) -> list[tuple[tuple[int, int], Labelled]]:
    """Ranges of the first dim, each with the boxes that overlap it, without their first dim."""
    waiting = sorted(boxes.items(), reverse=True)
    ends = sorted({end for box in boxes for end in box[0]})
    reaching: list[tuple[Box, int]] = []
    found: list[tuple[tuple[int, int], Labelled]] = []
    for start, stop in pairwise(ends):
        reaching = [(box, label) for box, label in reaching if box[0][1] > start]
        while waiting and waiting[-1][0][0][0] == start:
            reaching.append(waiting.pop())
        inside: Labelled = {}
        for box, label in reaching:
            inside[box[1:]] = inside.get(box[1:], 0) | label
        if found and found[-1][1] == inside and found[-1][0][1] == start:
            found[-1] = (found[-1][0][0], stop), inside
        elif inside:
            found.append(((start, stop), inside))
    return found
