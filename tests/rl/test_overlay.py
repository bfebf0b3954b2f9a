"""Labelled boxes laid over each other, held against the labels of every element."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from terrace.base.boxes import Box, cut, shifted
from terrace.rl.hand_over.overlay import overlay

Index = tuple[int, ...]


def labels(boxes: list[tuple[Box, int]]) -> dict[Index, int]:
    found: dict[Index, int] = {}
    for box, label in boxes:
        for index in product(*(range(start, stop) for start, stop in box)):
            found[index] = found.get(index, 0) | label
    return found


@st.composite
def labelled(draw: st.DrawFn) -> list[tuple[Box, int]]:
    dims = draw(st.integers(0, 3))
    side = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda ends: (min(ends), max(ends)))
    boxes = draw(st.lists(st.tuples(*[side] * dims), max_size=6))
    return [(box, 1 << index) for index, box in enumerate(boxes)]


@given(labelled())
def test_cells_have_the_labels_of_their_elements(boxes: list[tuple[Box, int]]) -> None:
    cells = overlay(boxes)
    assert labels(cells) == labels(boxes)
    assert sum(len(labels([cell])) for cell in cells) == len(labels(boxes)), "cells overlap"
    assert [cell for cell, _ in cells] == sorted(cell for cell, _ in cells)


def test_equal_boxes_and_touching_slabs_are_one_cell() -> None:
    assert overlay([(((0, 4), (0, 2)), 1), (((0, 4), (0, 2)), 2)]) == [(((0, 4), (0, 2)), 3)]
    assert overlay([(((0, 2), (0, 2)), 1), (((2, 4), (0, 2)), 1)]) == [(((0, 4), (0, 2)), 1)]
    assert overlay([((), 1), ((), 4)]) == [((), 5)]
    assert overlay([(((2, 2), (0, 2)), 1)]) == []


def test_ranges_of_a_matrix_have_about_as_many_cells_as_boxes() -> None:
    """As 256 ranks hold a matrix in flat ranges, while others need two halves of its columns."""
    ranges = [(100 * rank + rank % 7, 100 * rank + 100 + (rank + 1) % 7) for rank in range(256)]
    boxes = [(box, 1 << rank) for rank, ends in enumerate(ranges) for box in cut((801, 32), *ends)]
    halves = [(shifted(((0, 801), (0, 16)), (0, column)), 1 << 256 + column) for column in (0, 16)]
    assert len(overlay([*boxes, *halves])) <= 3 * len(boxes)
