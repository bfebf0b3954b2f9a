"""Which place a rank has on every axis of every tier.

On a tier, the axes of the mapping table divide the members in a fixed order, the first one fastest: columns and rows of
the tensor axis, Ulysses and ring of the context axis, data (depth included), pipeline. So ranks that talk most are
neighbours.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

from terrace.cluster import Cluster
from terrace.plan.plan import Plan

ORDER = ("columns", "rows", "ulysses", "ring", "data", "pipeline")
TENSOR = ("columns", "rows")
CONTEXT = ("ulysses", "ring")
PIPELINE = ("pipeline",)


@dataclass(frozen=True)
class Grid:
    """The degree of every axis on every tier, innermost tier first, axes as in `ORDER`."""

    degrees: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(cluster: Cluster, plan: Plan) -> "Grid":
        """Return the grid of a plan whose mapping fits the cluster."""
        return Grid(tuple(tuple(plan.degree(tier.name, axis, tier.size) for axis in ORDER) for tier in cluster.tiers))

    def combined(self, axes: Collection[str]) -> tuple[int, ...]:
        """Return the product of the degrees of `axes`, per tier."""
        return tuple(math.prod(row[ORDER.index(axis)] for axis in axes) for row in self.degrees)

    def total(self, axis: str) -> int:
        """Return the degree of an axis over all tiers."""
        return math.prod(self.combined([axis]))

    def coordinates(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the place of `rank` among the ranks that differ on `axes` alone, per tier."""
        places = []
        for row in self.degrees:
            rank, member = divmod(rank, math.prod(row))
            place, stride = 0, 1
            for axis, degree in zip(ORDER, row, strict=True):
                member, digit = divmod(member, degree)
                if axis in axes:
                    place += digit * stride
                    stride *= degree
            places.append(place)
        return tuple(places)

    def place(self, rank: int, axes: Collection[str]) -> int:
        """Return the number of `rank` among the ranks that differ on `axes` alone, the innermost tier fastest."""
        index = 0
        degrees = self.combined(axes)
        for degree, here in reversed(list(zip(degrees, self.coordinates(rank, axes), strict=True))):
            index = index * degree + here
        return index

    def members(self, rank: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on `axes` alone, itself included, in the order of their places."""
        found: tuple[int, ...] = (rank,)
        for tier, degree in enumerate(self.combined(axes)):
            peers = [self.peers(other, tier, axes) for other in found]
            found = tuple(ranks[place] for place in range(degree) for ranks in peers)
        return found

    def peers(self, rank: int, tier: int, axes: Collection[str]) -> tuple[int, ...]:
        """Return the ranks that differ from `rank` on `tier` and on `axes` alone, itself included, in their order."""
        inside = math.prod(math.prod(row) for row in self.degrees[:tier])
        row = self.degrees[tier]
        member = rank // inside % math.prod(row)
        members, stride = [member], 1
        for axis, degree in zip(ORDER, row, strict=True):
            if axis in axes:
                digit = member // stride % degree
                members = [other + (place - digit) * stride for place in range(degree) for other in members]
            stride *= degree
        return tuple(rank + (other - member) * inside for other in members)


def stage_of(grid: Grid, rank: int) -> int:
    """Return the pipeline stage of a rank: stages are numbered over the tiers, the innermost one fastest."""
    return grid.place(rank, PIPELINE)


@lru_cache(maxsize=4096)
def rank_at(grid: Grid, rank: int, stage: int) -> int:
    """Return the rank of `stage` that has the same place as `rank` on every other axis."""
    for tier, degree in enumerate(grid.combined(PIPELINE)):
        stage, place = divmod(stage, degree)
        rank = grid.peers(rank, tier, PIPELINE)[place]
    return rank


def edge_tier(grid: Grid, stage: int, other: int) -> int:
    """Return the index of the outermost tier that a message between two stages crosses."""
    crossed = 0
    for tier, degree in enumerate(grid.combined(PIPELINE)):
        (stage, here), (other, there) = divmod(stage, degree), divmod(other, degree)
        crossed = tier if here != there else crossed
    return crossed


def position(degrees: Sequence[int], coordinates: Sequence[int]) -> int:
    """Return which of the equal parts a rank holds when tier after tier, innermost first, divides what is left."""
    index = 0
    for degree, here in zip(degrees, coordinates, strict=True):
        index = index * degree + here
    return index
