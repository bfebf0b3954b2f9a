"""Which rows of a step the ranks of two plans hold after a forward, and the messages from one plan's to the other's.

Both plans divide the same global batch over the same ranks: micro-batch m of data rank d has the rows from
(m * degree + d) * micro_batch on. After a forward, the ranks of the last stage hold the hidden states of their rows; a
rank that reads a row which it does not hold gets it from the nearest one that does.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from terrace.cluster.cluster import Cluster
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan


@dataclass(frozen=True)
class Held:
    """The rows of a step of `num_rows` that each rank holds, micro-batch after micro-batch; none before the last stage.

    The plan's data ranks and micro-batch must divide the rows.
    """

    cluster: Cluster
    plan: Plan
    num_rows: int

    @cached_property
    def _layout(self) -> Layout:
        return Layout.of(self.cluster, self.plan)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh.of(self.cluster, self.plan)

    def is_last(self, rank: int) -> bool:
        return self.mesh.stage(rank) == self.mesh.total("pipeline") - 1

    def rows(self, rank: int) -> tuple[int, ...]:
        return self._of_data_rank[self._layout.data_rank(rank)] if self.is_last(rank) else ()

    @cached_property
    def _of_data_rank(self) -> list[tuple[int, ...]]:
        size, degree = self.plan.micro_batch, self._layout.data_degree
        found: list[list[int]] = [[] for _ in range(degree)]
        for first in range(0, self.num_rows, size):
            found[first // size % degree] += range(first, first + size)
        return list(map(tuple, found))

    @cached_property
    def holders(self) -> dict[int, list[int]]:
        found = defaultdict[int, list[int]](list)
        for rank in filter(self.is_last, range(self.cluster.world_size)):
            for row in self.rows(rank):
                found[row].append(rank)
        return dict(found)


@dataclass(frozen=True)
class RowMove:
    """Rows that `source` sends to `target`, over the outermost `tier` (its index) on which they differ."""

    source: int
    target: int
    tier: int
    rows: tuple[int, ...]


def row_moves(held: Held, read: Held) -> list[RowMove]:
    """The messages after which every rank holds the rows of `read`, ordered by target and source."""
    found = []
    cluster = held.cluster
    for target in filter(read.is_last, range(cluster.world_size)):
        own = set(held.rows(target))
        chosen = defaultdict[int, list[int]](list)
        for row in read.rows(target):
            if row not in own:
                chosen[_nearest(cluster, target, held.holders[row])].append(row)
        for source in sorted(chosen):
            found.append(RowMove(source, target, tier_between(cluster, source, target), tuple(chosen[source])))
    return found


def sent_bytes(cluster: Cluster, moves: Sequence[RowMove], rank: int, row_bytes: int) -> dict[str, int]:
    """Bytes that a rank sends by name of the tier, for rows of `row_bytes`."""
    total = defaultdict[str, int](int)
    for move in moves:
        if move.source == rank:
            total[cluster.tiers[move.tier].name] += len(move.rows) * row_bytes
    return dict(total)


def tier_between(cluster: Cluster, rank: int, other: int) -> int:
    """Index of the outermost tier on which two ranks differ; -1 for one rank."""
    pairs = zip(cluster.coordinates(rank), cluster.coordinates(other), strict=True)
    return max((tier for tier, (here, there) in enumerate(pairs) if here != there), default=-1)


def _nearest(cluster: Cluster, target: int, holders: Sequence[int]) -> int:
    # Among equally near ranks the closest number, so that replicas of a row do not all ask one rank.
    return min(holders, key=lambda rank: (tier_between(cluster, rank, target), abs(rank - target), rank))
