"""Candidate rings for a document, and the cost of a document on each.

A *unit* of tier l is the set of ring ranks inside one member of that tier; its children are units of the next inner
tier. A candidate is one ring rank, or two or more whole children of one unit, so that all ranks of a child send equally
over the slow link. It is therefore described by the tier that it crosses and its number of children there.
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from terrace.sequence.cost import WorkCost, ring_tokens


@dataclass(frozen=True)
class RingShape:
    """A ring over `num_children` children of a unit of `tier`, with `degrees` by tier and `num_ring_ranks` in total."""

    tier: int
    num_children: int
    degrees: tuple[int, ...]
    num_ring_ranks: int

    @property
    def ring(self) -> tuple[int, ...]:
        """Degrees on the tiers that the ring crosses, as in `Segment.shape`."""
        return tuple(degree for degree in self.degrees if degree > 1) or (1,)


class CandidateRings:
    """Ring shapes of a context group, fewest ring ranks first, and the seconds of documents on them."""

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
        """Number of ring ranks in a unit of each tier."""
        return tuple(math.prod(self.ring_degrees[: tier + 1]) for tier in range(len(self.ring_degrees)))

    @cached_property
    def _tried(self) -> tuple[tuple[int, list[int], list[int]], ...]:
        # Try every narrow ring, but only some wide ones: similar widths cost almost the same.
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
        """Yield (tier, indices of shapes with at least `num_ring_ranks` ranks); the widest shape is always included."""
        widest = self._tried[-1]
        for tier, indices, ring_ranks in self._tried:
            at = bisect_left(ring_ranks, num_ring_ranks)
            if at < len(indices):
                yield tier, indices[at:]
            elif ring_ranks is widest[2]:
                yield tier, indices[-1:]

    def seconds(self, length: int, index: int) -> float:
        """Seconds that a document takes on each rank of ring shape `index`."""
        key = (length, index)
        found = self._seconds.get(key)
        if found is None:
            found = self._seconds[key] = self.cost.ring_s(length, self.shapes[index].degrees)
        return found

    def fits(self, length: int, index: int) -> bool:
        """Whether an empty ring rank has room for its share of a document."""
        return ring_tokens(length, self.shapes[index].num_ring_ranks) <= self.capacity
