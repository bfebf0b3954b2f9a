"""Which groups of places a sequence may have, and what it costs on each.

A *unit* of tier l is the places inside one member of that tier; units of the tier below it are its children. A group is
one place; a ring of places inside one unit of the innermost tier that joins places; or the whole children of a unit of
an outer tier, two or more: then all ranks of a child send the same over the slow link. So a group is told by the tier
that it crosses and by how many children it has there.
"""

import math
from dataclasses import dataclass
from functools import cached_property

from terrace.spread.cost import WorkCost, ring_tokens


@dataclass(frozen=True)
class Shape:
    """`num_children` units below tier `tier`: `degrees` on every tier, `num_places` together."""

    tier: int
    num_children: int
    degrees: tuple[int, ...]
    num_places: int

    @property
    def ring(self) -> tuple[int, ...]:
        """The degrees of a segment: of the tiers that it crosses."""
        return tuple(degree for degree in self.degrees if degree > 1) or (1,)


class Groups:
    """The shapes of a pool with `place_degrees` on the tiers, fewest places first, and seconds of lengths on them."""

    def __init__(self, place_degrees: tuple[int, ...], cost: WorkCost, capacity: int) -> None:
        assert len(place_degrees) == len(cost.links), (place_degrees, len(cost.links))
        self.place_degrees, self.cost, self.capacity = place_degrees, cost, capacity
        self.num_places = math.prod(place_degrees)
        shapes = [Shape(0, 1, (1,) * len(place_degrees), 1)]
        inside = 1
        for tier, degree in enumerate(place_degrees):
            inner, outer = place_degrees[:tier], (1,) * (len(place_degrees) - tier - 1)
            for count in range(2, degree + 1):
                shapes.append(Shape(tier, count, (*inner, count, *outer), count * inside))
            inside *= degree
        self.shapes = tuple(shapes)
        self._seconds: dict[tuple[int, int], float] = {}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many places a unit of each tier has."""
        return tuple(math.prod(self.place_degrees[: tier + 1]) for tier in range(len(self.place_degrees)))

    def child_size(self, shape: Shape) -> int:
        """Return how many places a child of a group has."""
        return shape.num_places // shape.num_children

    def first(self, num_places: float) -> int:
        """Return the index of the first shape with so many places, or the number of shapes."""
        low, high = 0, len(self.shapes)
        while low < high:
            middle = (low + high) // 2
            if self.shapes[middle].num_places < num_places:
                low = middle + 1
            else:
                high = middle
        return low

    def wide(self, num_places: float) -> list[int]:
        """Return indices of shapes of at least so many places: narrow ones all, the others ever more sparsely.

        The last shape is always among them.
        """
        index, found = self.first(num_places), []
        last = len(self.shapes) - 1
        while index < last:
            found.append(index)
            index += 1 + index // 16
        return [*found, last]

    def seconds(self, length: int, index: int) -> float:
        """Return the seconds that a sequence takes on every place of a group of a shape."""
        key = (length, index)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self.cost.ring_s(length, self.shapes[index].degrees)
        return found

    def fits(self, length: int, index: int) -> bool:
        """Whether an empty place has room for its part of a sequence."""
        return ring_tokens(length, self.shapes[index].num_places) <= self.capacity
