"""Call a function once per group of equal values.

Most blocks of a model are equal, and usually the same object. Values are compared, identity first, because a hash would
read every parameter of a block.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def first_equal(values: Sequence[object]) -> list[int]:
    """For each value, the index of the first value equal to it."""
    distinct: list[object] = []
    firsts: list[int] = []
    found: list[int] = []
    for index, value in enumerate(values):
        # Runs of one object are the usual case.
        if index and value is values[index - 1]:
            found.append(found[-1])
            continue
        # Not `list.index`: its error message would format the whole value, and programs are long.
        place = next((place for place, known in enumerate(distinct) if value == known), None)
        if place is None:
            distinct.append(value)
            firsts.append(index)
        found.append(index if place is None else firsts[place])
    return found


def once_each(function: Callable[[T], R], values: Sequence[T]) -> list[R]:
    """Map `function` over `values`, with one call for equal values."""
    firsts = first_equal(values)
    results = {first: function(values[first]) for first in dict.fromkeys(firsts)}
    return [results[first] for first in firsts]
