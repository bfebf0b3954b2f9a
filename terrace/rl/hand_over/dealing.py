"""Assigns model slices to ranks for generation such that ranks receive as few elements as possible.

A generation replica has one rank per slice. A replica stays inside the smallest unit of inner tiers that has room for
it, so its per-token messages use fast links. Inside a unit every slice is assigned to equally many ranks, chosen to
maximise the elements that they already hold. A rank receives only the elements of its slice that it lacks.

On ranks of a tensor axis, in any number of stages, this is HybridFlow's strided grouping (2409.19256, section 5.3):
training rank (pp, tp) of t gets slice tp // (t / g) of g, which contains its parameters. With S = p t ranks that hold
a model of M bytes once, a rank receives (S - g) / (g S) M bytes and holds at most M / g, without duplicates. With
neighbours as a replica (rank tp with slice tp % g), ranks receive more and keep parameters outside their slice.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from terrace.base.boxes import numel
from terrace.base.errors import PlanError
from terrace.rl.hand_over.moves import Parts, cells_of, members

Replica = tuple[int, ...]  # rank of each slice


def kept_elements(holds: Sequence[Parts], slices: Sequence[Parts]) -> list[list[int]]:
    """[rank][slice] -> elements of the slice that the rank already holds."""
    kept = [[0] * len(slices) for _ in holds]
    for cell in cells_of(holds, slices):
        count, wanting = numel(cell.box), members(cell.needers)
        for rank in members(cell.holders):
            for index in wanting:
                kept[rank][index] += count
    return kept


def deal(kept: Sequence[Sequence[int]], tiers: Sequence[int]) -> list[Replica]:
    """Replicas that maximise the elements that ranks keep; `kept` is `kept_elements` summed over blocks.

    `tiers` are the sizes of the cluster's tiers, innermost first. Raises `PlanError` if the number of slices does not
    divide the number of ranks.
    """
    num_slices, world = len(kept[0]), math.prod(tiers)
    fitting = [ranks for ranks in accumulate(tiers, mul) if ranks % num_slices == 0]
    if not fitting:
        fix = max(rows for rows in range(1, num_slices) if world % rows == 0)
        raise PlanError(
            f"replicas of {num_slices} tensor rows on {world} ranks: rows must divide the ranks, so use {fix}"
        )
    unit, found = fitting[0], list[Replica]()
    for first in range(0, world, unit):
        by_slice = _shared_out(kept[first : first + unit], unit // num_slices)
        found += zip(*([first + place for place in places] for places in by_slice), strict=True)
    return found


def needs_of(replicas: Sequence[Replica], slices: Sequence[Parts], world_size: int) -> list[Parts]:
    """Parts that each rank of the cluster needs; empty for ranks outside all replicas."""
    slice_of = {rank: index for replica in replicas for index, rank in enumerate(replica)}
    return [slices[slice_of[rank]] if rank in slice_of else {} for rank in range(world_size)]


def _shared_out(kept: Sequence[Sequence[int]], room: int) -> list[list[int]]:
    """Assign `room` ranks to each slice, maximising the sum of kept[rank][slice].

    Ranks are added one by one (successive longest paths, Ahuja et al., Network Flows, section 9.7). A new rank joins a
    slice; if that is full, one of its ranks moves on to another slice, and so on until there is room. Taking the best
    such chain each time keeps the assignment of the ranks so far optimal.
    """
    ranks: list[list[int]] = [[] for _ in kept[0]]
    passed: list[dict[int, tuple[int, int]]] = [{} for _ in kept[0]]
    for comer, own in enumerate(kept):
        best, came_from = list(own), [-1] * len(own)
        # Bellman-Ford: no chain visits a slice twice.
        for _ in range(len(ranks) - 1):
            for index, chosen in enumerate(passed):
                for other, (gain, _) in chosen.items():
                    if best[index] + gain > best[other]:
                        best[other], came_from[other] = best[index] + gain, index
        end = max((index for index in range(len(ranks)) if len(ranks[index]) < room), key=best.__getitem__)
        changed = [end]
        while (index := came_from[end]) >= 0:
            moved = passed[index][end][1]
            ranks[index].remove(moved)
            ranks[end].append(moved)
            end = index
            changed.append(end)
        ranks[end].append(comer)
        for index in changed:
            passed[index] = _passed_on(kept, ranks[index], index)
    return [sorted(own) for own in ranks]


def _passed_on(kept: Sequence[Sequence[int]], ranks: Sequence[int], index: int) -> dict[int, tuple[int, int]]:
    """For every other slice: (best gain from moving one of `ranks` from slice `index` to it, that rank)."""
    others = [other for other in range(len(kept[0])) if other != index]
    return {other: max((kept[rank][other] - kept[rank][index], rank) for rank in ranks) for other in others}
