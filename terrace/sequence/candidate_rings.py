"""Which groups of places a sequence may have, and what it costs on each.

A *unit* of tier l is the places inside one member of that tier; units of the tier below it are its children. A group is
one place; a ring of places inside one unit of the innermost tier that joins places; or the whole children of a unit of
an outer tier, two or more: then all ranks of a child send the same over the slow link. So a group is told by the tier
that it crosses and by how many children it has there.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from terrace.sequence.cost import WorkCost, ring_tokens


@dataclass(frozen=True)
class RingShape:
    """`num_children` units below tier `tier`: `degrees` on every tier, `num_ring_ranks` together."""

    tier: int
    num_children: int
    degrees: tuple[int, ...]
    num_ring_ranks: int

    @property
    def ring(self) -> tuple[int, ...]:
        """The degrees of a segment: of the tiers that it crosses."""
        return tuple(degree for degree in self.degrees if degree > 1) or (1,)


class CandidateRings:
    """The shapes of a pool with `ring_degrees` on the tiers, fewest places first, and seconds of lengths on them."""

    def __init__(self, ring_degrees: tuple[int, ...], cost: WorkCost, capacity: int) -> None:
        assert len(ring_degrees) == len(cost.links), (ring_degrees, len(cost.links))
        self.ring_degrees, self.cost, self.capacity = ring_degrees, cost, capacity
        self.num_ring_ranks = math.prod(ring_degrees)
        shapes = [RingShape(0, 1, (1,) * len(ring_degrees), 1)]
        inside = 1
        for tier, degree in enumerate(ring_degrees):
            inner, outer = ring_degrees[:tier], (1,) * (len(ring_degrees) - tier - 1)
            for count in range(2, degree + 1):
                shapes.append(RingShape(tier, count, (*inner, count, *outer), count * inside))
            inside *= degree
        self.shapes = tuple(shapes)
        self._seconds: dict[tuple[int, int], float] = {}

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """How many places a unit of each tier has."""
        return tuple(math.prod(self.ring_degrees[: tier + 1]) for tier in range(len(self.ring_degrees)))

    @cached_property
    def _tried(self) -> tuple[tuple[int, list[int], list[int]], ...]:
        """Each tier, the shapes to try that cross it, and their places: narrow ones all, others ever more sparsely."""
        index, by_tier = 0, dict[int, list[int]]()
        while index < len(self.shapes):
            by_tier.setdefault(self.shapes[index].tier, []).append(index)
            index += 1 + index // 16
        last = len(self.shapes) - 1
        if last not in by_tier[self.shapes[last].tier]:
            by_tier[self.shapes[last].tier].append(last)
        return tuple(
            (tier, found, [self.shapes[index].num_ring_ranks for index in found]) for tier, found in by_tier.items()
        )

    def wide(self, num_ring_ranks: float) -> Iterator[tuple[int, list[int]]]:
        """Yield tiers and the indices of shapes that cross them, of at least so many places or else the widest."""
        widest = self._tried[-1]
        for tier, indices, ring_ranks in self._tried:
            at = bisect_left(ring_ranks, num_ring_ranks)
            if at < len(indices):
                yield tier, indices[at:]
            elif ring_ranks is widest[2]:
                yield tier, indices[-1:]

    def seconds(self, length: int, index: int) -> float:
        """Return the seconds that a sequence takes on every place of a group of a shape."""
        key = (length, index)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self.cost.ring_s(length, self.shapes[index].degrees)
        return found

    def fits(self, length: int, index: int) -> bool:
        """Whether an empty place has room for its part of a sequence."""
        return ring_tokens(length, self.shapes[index].num_ring_ranks) <= self.capacity
