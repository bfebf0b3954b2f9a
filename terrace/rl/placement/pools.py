"""Pools: consecutive devices that a set of roles shares, as separate clusters; and all ways to group roles.

A pool is an even fraction of a unit of some tier, or whole members of the outermost tier, so that pools of equal size
are equal wherever they are placed. Pools are placed one after another, largest first; none crosses the boundary of a
unit that it would fit into.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster


@lru_cache(maxsize=64)
def pool_sizes(cluster: Cluster) -> tuple[int, ...]:
    found = {1}
    for index, tier in enumerate(cluster.tiers):
        inside, is_last = cluster.ranks_within(index - 1), index == len(cluster.tiers) - 1
        found |= {inside * part for part in range(1, tier.size + 1) if is_last or tier.size % part == 0}
    return tuple(sorted(found))


@lru_cache(maxsize=4096)
def pool_cluster(cluster: Cluster, size: int) -> Cluster:
    """`size` consecutive devices of the cluster as a cluster. Raises `PlanError` for an impossible pool size."""
    sizes = pool_sizes(cluster)
    if size not in sizes:
        fitting = [each for each in sizes if each < size]
        nearest = f"use {fitting[-1]}, or {sizes[len(fitting)]}" if fitting and size < sizes[-1] else f"use {sizes[-1]}"
        raise PlanError(
            f"a pool of {size} devices is no even part of cluster {cluster.name!r} ({_tiers(cluster)}): {nearest}"
        )
    if size == cluster.world_size:
        return cluster
    tiers, inside = [], 1
    for tier in cluster.tiers:
        tiers.append(replace(tier, size=max(1, min(tier.size, size // inside))))
        inside *= tier.size
    return replace(cluster, tiers=tuple(tiers))


def first_ranks(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[int, ...] | None:
    """The first rank of each pool, in the order of `sizes`; None if the pools cannot be placed."""
    starts, at = [0] * len(sizes), 0
    # Stable: equal pools keep their order.
    for index in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        unit, around = _units(cluster, sizes[index])
        if at % unit or at // around != (at + sizes[index] - 1) // around:
            return None
        starts[index] = at
        at += sizes[index]
    return tuple(starts) if at <= cluster.world_size else None


def side_by_side(cluster: Cluster, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`first_ranks`. Raises `PlanError` if the pools cannot be placed."""
    firsts = first_ranks(cluster, sizes)
    if firsts is None:
        raise PlanError(
            f"pools of {', '.join(map(str, sizes))} devices do not lie side by side on the {cluster.world_size} of "
            f"cluster {cluster.name!r}: use sizes of {', '.join(map(str, pool_sizes(cluster)))} that fill its tiers"
        )
    return firsts


def partitions(count: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every partition of range(count) into sets, fewest sets first; sets and their members are in ascending order."""

    def extend(sets: tuple[tuple[int, ...], ...], at: int) -> Iterator[tuple[tuple[int, ...], ...]]:
        if at == count:
            yield sets
            return
        for index, own in enumerate(sets):
            yield from extend((*sets[:index], (*own, at), *sets[index + 1 :]), at + 1)
        yield from extend((*sets, (at,)), at + 1)

    yield from sorted(extend((), 0), key=len)


def _units(cluster: Cluster, size: int) -> tuple[int, int]:
    """(Devices per member that a pool of this size consists of, devices per unit that contains it)."""
    for index in range(len(cluster.tiers)):
        if size <= cluster.ranks_within(index):
            return cluster.ranks_within(index - 1), cluster.ranks_within(index)
    raise PlanError(f"a pool of {size} devices is larger than cluster {cluster.name!r} of {cluster.world_size}")


def _tiers(cluster: Cluster) -> str:
    return " x ".join(f"{tier.size} {tier.name}" for tier in reversed(cluster.tiers))
