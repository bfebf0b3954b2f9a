"""Seconds of a message on the tiers of a cluster: an alpha-beta model, hierarchical or a flat ring.

A group is a tuple of degrees, innermost tier first: how many of its members differ on that tier. (2, 1, 4) on
package, node, system is 8 ranks: pairs of a package on 4 nodes. Tiers that are left out have degree 1.

With S the bytes that the whole group holds, g_i the degrees and b_i the rate of tier i for one rank, a gather is
the cheaper of two algorithms, as NCCL's tuner would choose; a reduction is its mirror, an all-reduce both:

    hierarchical  sum over tiers of (g_i - 1) latency_i + (g_i - 1)/g_i S_i / b_i(S_i),  S_1 = S, S_(i+1) = S_i / g_i
    flat ring     (n - 1) max latency_i + (n - 1)/n S / min over tiers of r_i b_i(S),  r_i = g_1 ... g_(i-1)

A flat ring crosses a tier at every boundary between members, with the links of all r_i ranks of the group inside a
member (one channel each). A small all-reduce may climb a tree instead, 2 log2(n) steps with twice its bytes.

Who shares what. A tier's bandwidth is what each device gets when all devices use the tier at the same time, on
links of their own or (`shared`) on one link for all ranks inside a member. So several groups that each bring one
rank a node, as data-parallel groups beside tensor ranks do, never slow one another further: that is the figure.
What can change is the other way: on a shared tier, with only `concurrent` of the R ranks inside a member sending,
each gets R / concurrent of the figure, yet no more than the tier inside lets out. `concurrent` counts ranks of all
groups together; left out, it is all R. On links of their own it changes nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.base.errors import ClusterError
from terrace.cluster import Cluster
from terrace.plan.wire import FORMATS
from terrace.simulate.work import Work

Group = Sequence[int]


def rate_bytes_per_s(
    cluster: Cluster, tier: int, num_bytes: float, *, degree: int = 0, concurrent: int | None = None
) -> float:
    """Return what one rank sends over a tier, in bytes/s, in a message of `num_bytes`.

    Among `degree` members (0: all) of a tier that is wired in pairs, only the links to the others are of use.
    Raises `ClusterError` when `concurrent` is not between 1 and the ranks inside a member.
    """
    here = cluster.tiers[tier]
    rate = here.bandwidth_bytes_per_s
    if here.direct and degree > 1 and here.size > 1:
        rate *= min(1.0, (degree - 1) / (here.size - 1))
    if concurrent is not None:
        _check_concurrent(cluster, tier, concurrent)
        if here.shared:
            inside = cluster.tiers[tier - 1].bandwidth_bytes_per_s if tier else rate
            rate = max(rate, min(rate * cluster.ranks_within(tier - 1) / concurrent, inside))
    return rate * here.efficiency * (num_bytes / (num_bytes + here.half_bytes) if num_bytes else 1.0)


def hop_s(cluster: Cluster, tier: int, degree: int, num_bytes: float) -> float:
    """Return the seconds in which every one of `degree` members of a tier sends `num_bytes` to the others together.

    (degree - 1) latency + bytes / rate, at the rate that a message of all their parts reaches.
    """
    whole = num_bytes * degree / (degree - 1) if degree > 1 else num_bytes
    rate = rate_bytes_per_s(cluster, tier, whole, degree=degree)
    return (degree - 1) * cluster.tiers[tier].latency_s + num_bytes / rate


def all_gather_s(cluster: Cluster, group: Group, num_bytes: float, *, concurrent: int | None = None) -> float:
    """Return the seconds until every rank of a group holds all `num_bytes`, of which each began with its part.

    This and the functions below raise `ClusterError` for a group that the cluster cannot hold.
    """
    degrees = _degrees(cluster, group, concurrent)
    if math.prod(degrees) == 1 or not num_bytes:
        return 0.0
    hierarchical = _hierarchical_s(cluster, degrees, num_bytes, concurrent)
    return min(hierarchical, _flat_s(cluster, degrees, num_bytes, concurrent)) + cluster.device.kernels.launch_s


def reduce_scatter_s(cluster: Cluster, group: Group, num_bytes: float, *, concurrent: int | None = None) -> float:
    """Return the seconds until every rank of a group holds its part of the sum of `num_bytes`."""
    return all_gather_s(cluster, group, num_bytes, concurrent=concurrent)


def all_reduce_s(cluster: Cluster, group: Group, num_bytes: float, *, concurrent: int | None = None) -> float:
    """Return the seconds until every rank of a group holds the sum of `num_bytes`."""
    degrees = _degrees(cluster, group, concurrent)
    num_ranks = math.prod(degrees)
    if num_ranks == 1 or not num_bytes:
        return 0.0
    launch_s = cluster.device.kernels.launch_s
    ring_s = 2 * all_gather_s(cluster, group, num_bytes, concurrent=concurrent) - launch_s
    crossed = [tier for tier, degree in enumerate(degrees) if degree > 1]
    latency_s = sum(2 * math.log2(degrees[tier]) * cluster.tiers[tier].latency_s for tier in crossed)
    slowest = min(_share(cluster, degrees, tier, num_bytes, concurrent) for tier in crossed)
    return min(ring_s, latency_s + 2 * num_bytes / slowest + launch_s)


def all_to_all_s(cluster: Cluster, group: Group, num_bytes: float, *, concurrent: int | None = None) -> float:
    """Return the seconds in which every rank deals its `num_bytes` out in equal parts to the group, itself included.

    The part for peers that differ on tier i at the outermost crosses that tier: S (r_(i+1) - r_i) / n. Messages to
    peers start together, so a tier's latency counts once; tiers follow one another.
    """
    return math.fsum(all_to_all_tiers(cluster, group, num_bytes, concurrent=concurrent).values())


def all_to_all_tiers(
    cluster: Cluster, group: Group, num_bytes: float, *, concurrent: int | None = None
) -> dict[int, float]:
    """Return the same by tier index; the launch counts on the first one crossed."""
    degrees = _degrees(cluster, group, concurrent)
    num_ranks = math.prod(degrees)
    if num_ranks == 1 or not num_bytes:
        return {}
    found: dict[int, float] = {}
    launch_s, inside = cluster.device.kernels.launch_s, 1
    for tier, degree in enumerate(degrees):
        if degree > 1:
            part = num_bytes * inside * (degree - 1) / num_ranks
            rate = rate_bytes_per_s(cluster, tier, part, degree=degree, concurrent=_at(cluster, tier, concurrent))
            found[tier] = launch_s + cluster.tiers[tier].latency_s + part / rate
            launch_s = 0.0
        inside *= degree
    return found


def tier_penalty(cluster: Cluster, tier: int) -> float:
    """Return by what part of the time that a message takes on a tier computing beside it slows."""
    own = cluster.tiers[tier].overlap_penalty
    return cluster.device.overlap_penalty if own is None else own


def send_s(cluster: Cluster, tier: int, num_bytes: float, *, concurrent: int | None = None) -> float:
    """Return the seconds of a message of `num_bytes` from one rank to one other across tier `tier`."""
    if not num_bytes:
        return 0.0
    here = cluster.tiers[tier]
    rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=2, concurrent=concurrent)
    return here.latency_s + num_bytes / rate + cluster.device.kernels.launch_s


def overlapped_s(compute_s: float, message_s: float, penalty: float, tail_s: float = 0.0) -> float:
    """Return the seconds of computation and messages side by side, where computing slows by `penalty` meanwhile.

    max(C (1 + penalty min(1, N / C)), N) + tail: never better than the longer of them, nor, with a penalty of
    at most 1, worse than both in turn. `tail_s` is what nothing can hide: a first gather, a last reduction.
    """
    return max(compute_s + penalty * min(compute_s, message_s), message_s) + tail_s


@dataclass(frozen=True, kw_only=True)
class LayerMessages:
    """Seconds of the tensor-parallel messages of one layer on one micro-batch."""

    forward_s: float
    backward_s: float
    again_s: float = 0.0  # while the forward is run again


def tensor_messages(cluster: Cluster, group: Group, work: Work) -> LayerMessages:
    """Return the seconds of a layer's tensor-parallel messages, none of them hidden.

    Two all-reduces of T x H each way (Shoeybi et al. 1909.08053). With sequence parallelism each is an
    all-gather and a reduce-scatter, which cost the same, and the backward gathers the two inputs once more
    (Korthikanti et al. 2205.05198, section 4.2). Full recomputation repeats the forward's.
    Raises `ClusterError` when the group does not hold `work.tensor` ranks.
    """
    if math.prod(group) != work.tensor:
        raise ClusterError(f"a group of {math.prod(group)} ranks for tensor = {work.tensor}: give it that many")
    num_bytes = work.tokens * work.model.hidden_size * FORMATS[work.compute].element_bytes
    if work.sequence_parallel:
        gather_s = all_gather_s(cluster, group, num_bytes)
        forward = 2 * (gather_s + reduce_scatter_s(cluster, group, num_bytes))
        backward = forward + 2 * gather_s
    else:
        forward = backward = 2 * all_reduce_s(cluster, group, num_bytes)
    return LayerMessages(forward_s=forward, backward_s=backward, again_s=forward if work.recompute == "full" else 0.0)


def _degrees(cluster: Cluster, group: Group, concurrent: int | None) -> tuple[int, ...]:
    """Return the degrees of a group that exists; raises `ClusterError` for one that does not."""
    degrees = tuple(group)
    if len(degrees) > len(cluster.tiers):
        raise ClusterError(f"a group on {len(degrees)} tiers: cluster {cluster.name!r} has {len(cluster.tiers)}")
    for degree, tier in zip(degrees, cluster.tiers, strict=False):
        if not 1 <= degree <= tier.size:
            raise ClusterError(f"a group of degree {degree} on tier {tier.name!r}: give 1 to {tier.size}")
    if concurrent is not None:
        crossed = [tier for tier, degree in enumerate(degrees) if degree > 1]
        _check_concurrent(cluster, max(crossed, default=0), concurrent)
    return degrees


def _check_concurrent(cluster: Cluster, tier: int, concurrent: int) -> None:
    ranks = cluster.ranks_within(tier - 1)
    if not 1 <= concurrent <= ranks:
        raise ClusterError(
            f"{concurrent} ranks cannot share tier {cluster.tiers[tier].name!r}: a member holds 1 to {ranks} of them"
        )


def _at(cluster: Cluster, tier: int, concurrent: int | None) -> int | None:
    """Return how many ranks share a tier: a member of an inner one may hold fewer than send further out."""
    return None if concurrent is None else min(concurrent, cluster.ranks_within(tier - 1))


def _hierarchical_s(cluster: Cluster, degrees: Group, num_bytes: float, concurrent: int | None) -> float:
    total = 0.0
    for tier, degree in enumerate(degrees):
        if degree > 1:
            rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=degree, concurrent=_at(cluster, tier, concurrent))
            total += (degree - 1) * (cluster.tiers[tier].latency_s + num_bytes / degree / rate)
            num_bytes /= degree
    return total


def _flat_s(cluster: Cluster, degrees: Group, num_bytes: float, concurrent: int | None) -> float:
    num_ranks = math.prod(degrees)
    crossed = [tier for tier, degree in enumerate(degrees) if degree > 1]
    slowest = min(_share(cluster, degrees, tier, num_bytes, concurrent) for tier in crossed)
    latency_s = max(cluster.tiers[tier].latency_s for tier in crossed)
    return (num_ranks - 1) * (latency_s + num_bytes / num_ranks / slowest)


def _share(cluster: Cluster, degrees: Group, tier: int, num_bytes: float, concurrent: int | None) -> float:
    """Return the rate at which a ring over the whole group leaves a member of tier `tier`."""
    inside = math.prod(degrees[:tier])
    return inside * rate_bytes_per_s(
        cluster, tier, num_bytes, degree=degrees[tier], concurrent=_at(cluster, tier, concurrent)
    )
