"""Dealing the slices of a model to ranks, so that they receive the least when they take them over.

A replica for generation has a rank for every slice. Replicas lie in units of the innermost tiers with room for one, so
messages that their ranks exchange for every token stay on fast links. Inside a unit each slice goes to equally many
ranks, chosen so that together they already hold the most of their slices. A rank receives the elements of its slice
that it does not hold.

On ranks of a tensor axis, in any number of stages, this is HybridFlow's strided grouping (2409.19256, section 5.3):
training rank (pp, tp) of t gets slice tp // (t / g) of g, so that its parameters are part of its slice. With S = p t
ranks that hold a model of M bytes once, it receives (S - g) / (g S) M, holds M / g at the most, and nothing twice.
Neighbours as a replica, rank tp with slice tp % g, receive more and keep parameters that are no part of their slice.
"""

import math
from collections.abc import Sequence
from itertools import accumulate
from operator import mul

from terrace.base.boxes import numel
from terrace.base.errors import PlanError
from terrace.plan.hand_over import Parts, cells_of, members

Replica = tuple[int, ...]  # the rank that has each slice


def kept_elements(holds: Sequence[Parts], slices: Sequence[Parts]) -> list[list[int]]:
    """Elements of each slice that each rank holds already, by rank and slice."""
    kept = [[0] * len(slices) for _ in holds]
    for cell in cells_of(holds, slices):
        count, wanting = numel(cell.box), members(cell.needers)
        for rank in members(cell.holders):
            for index in wanting:
                kept[rank][index] += count
    return kept


def deal(kept: Sequence[Sequence[int]], tiers: Sequence[int]) -> list[Replica]:
    """The replicas of slices, such that ranks keep the most of `kept` (`kept_elements`, summed over blocks).

    `tiers` are the sizes of the cluster's tiers, innermost first. Raises `PlanError` where slices do not divide ranks.
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
    """The parts that each of the cluster's ranks needs for its slice; none of a rank in no replica."""
    slice_of = {rank: index for replica in replicas for index, rank in enumerate(replica)}
    return [slices[slice_of[rank]] if rank in slice_of else {} for rank in range(world_size)]


def _shared_out(kept: Sequence[Sequence[int]], room: int) -> list[list[int]]:
    """The ranks of each slice, `room` for each, with the largest sum of kept[rank][slice].

    Ranks come one by one (successive longest paths, Ahuja et al., Network Flows, section 9.7): one takes a slice, whose
    ranks may pass one of them on to another slice, until there is room. Each time the best of all such chains is taken,
    which keeps the sum the largest for the ranks that have come.
    """
    ranks: list[list[int]] = [[] for _ in kept[0]]
    passed: list[dict[int, tuple[int, int]]] = [{} for _ in kept[0]]
    for comer, own in enumerate(kept):
        best, came_from = list(own), [-1] * len(own)
        # Bellman-Ford: no chain passes a slice twice.
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
    """For every other slice, the best gain from giving it one of the ranks of slice `index`, and which rank."""
    others = [other for other in range(len(kept[0])) if other != index]
    return {other: max((kept[rank][other] - kept[rank][index], rank) for rank in ranks) for other in others}
