"""Seconds of a message on the tiers of a cluster: an alpha-beta model, tier after tier.

A group is a tuple of degrees, innermost tier first: how many of its members differ on that tier. (2, 1, 4) on package,
node, system is 8 ranks: pairs of a package on 4 nodes. Tiers that are left out have degree 1.

With S the bytes that the whole group holds, g_i the degrees and b_i the rate of tier i for one rank, a gather takes

sum over tiers of (g_i - 1) latency_i + (g_i - 1)/g_i S_i / b_i(S_i),  S_1 = S, S_(i+1) = S_i / g_i

and a reduction, its mirror, takes the same; the runtime sends them this way (terrace.plan.hops).

A tier's bandwidth is the share of each device when all devices use the tier at the same time, on links of their own or
(`shared`) on one link for all ranks inside a member. Several groups that each bring one rank per node, such as the
data-parallel groups of different tensor ranks, therefore do not slow each other further.
"""

from collections.abc import Iterable, Sequence

from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster

Group = Sequence[int]


def rate_bytes_per_s(cluster: Cluster, tier: int, num_bytes: float, *, degree: int = 0) -> float:
    """Rate of one rank over a tier, in bytes/s, in a message of `num_bytes`.

    Among `degree` members (0: all) of a tier that is wired in pairs, only the links to the others are of use.
    """
    here = cluster.tiers[tier]
    rate = here.bandwidth_bytes_per_s
    # Devices wired in pairs share their bandwidth among size - 1 links.
    if here.direct and degree > 1 and here.size > 1:
        rate *= min(1.0, (degree - 1) / (here.size - 1))
    return rate * here.efficiency * (num_bytes / (num_bytes + here.half_bytes) if num_bytes else 1.0)


def hop_s(cluster: Cluster, tier: int, degree: int, num_bytes: float) -> float:
    """Seconds in which each of `degree` members of a tier sends `num_bytes` to the others together.

    (degree - 1) latency + bytes / rate, at the rate of a message as large as all their parts.
    """
    # The rate depends on the whole message, of which a rank sends all parts but one.
    whole = num_bytes * degree / (degree - 1) if degree > 1 else num_bytes
    rate = rate_bytes_per_s(cluster, tier, whole, degree=degree)
    return (degree - 1) * cluster.tiers[tier].latency_s + num_bytes / rate


def gather_s(cluster: Cluster, group: Group, num_bytes: float) -> float:
    """Seconds until every rank of a group holds all `num_bytes`, starting from one part each.

    A reduction takes as long. Raises `ClusterError` for a group that the cluster cannot hold.
    """
    total_s = 0.0
    # Innermost tier first, as in the module's formula.
    for tier, degree in enumerate(_degrees(cluster, group)):
        if degree > 1 and num_bytes:
            total_s += hop_s(cluster, tier, degree, num_bytes * (degree - 1) / degree)
            # Each member of this tier brings 1 / degree of the bytes, gathered over the outer tiers.
            num_bytes /= degree
    return total_s + cluster.device.kernels.launch_s if total_s else 0.0


def exchange_tiers(cluster: Cluster, degrees: Group, sends: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Seconds, by tier index, of an exchange in which each rank sends `sends`, pairs of (tier, bytes).

    Messages to all peers start together, so a tier's latency counts once; tiers follow each other. The launch counts on
    the first tier.
    """
    found: dict[int, float] = {}
    launch_s = cluster.device.kernels.launch_s
    for tier, num_bytes in sends:
        rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=degrees[tier])
        found[tier] = launch_s + cluster.tiers[tier].latency_s + num_bytes / rate
        # One launch starts the messages of all tiers.
        launch_s = 0.0
    return found


def tier_penalty(cluster: Cluster, tier: int) -> float:
    """Slow-down of compute while a message is on a tier, as a share of the message's time."""
    # A tier without a penalty of its own has the device's.
    own = cluster.tiers[tier].overlap_penalty
    return cluster.device.overlap_penalty if own is None else own


def send_s(cluster: Cluster, tier: int, num_bytes: float) -> float:
    """Seconds of a message of `num_bytes` from one rank to another across tier `tier`."""
    if not num_bytes:
        return 0.0
    here = cluster.tiers[tier]
    rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=2)
    return here.latency_s + num_bytes / rate + cluster.device.kernels.launch_s


def _degrees(cluster: Cluster, group: Group) -> tuple[int, ...]:
    degrees = tuple(group)
    if len(degrees) > len(cluster.tiers):
        raise ClusterError(f"a group on {len(degrees)} tiers: cluster {cluster.name!r} has {len(cluster.tiers)}")
    for degree, tier in zip(degrees, cluster.tiers, strict=False):
        if not 1 <= degree <= tier.size:
            raise ClusterError(f"a group of degree {degree} on tier {tier.name!r}: give 1 to {tier.size}")
    return degrees
