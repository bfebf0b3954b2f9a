"""Seconds of a message on the tiers of a cluster: an alpha-beta model per tier.

A collective costs the sum of its hops, one tier after the other, as the runtime sends it (terrace.plan.hops). Among g
members of a tier whose rate for one rank is b, a hop that gathers or reduces S bytes takes

    (g - 1) latency + (g - 1)/g S / b(S)

along a ring, or the seconds of a tree if less (`Tier.tree`), as a library chooses by size and width.

A tier's bandwidth is the share of each device when all devices use the tier at the same time, on links of their own or
(`shared`) on one link for all ranks inside a member. Several groups with one rank per node each, such as the
data-parallel groups of different tensor ranks, therefore do not slow each other further.
"""

from collections.abc import Iterable, Sequence

from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.width import share

Group = Sequence[int]


def rate_bytes_per_s(cluster: Cluster, tier: int, num_bytes: float, *, degree: int = 0) -> float:
    """Rate of one rank over a tier, in bytes/s, in a message of `num_bytes` among `degree` members (0: all)."""
    here = cluster.tiers[tier]
    rate = here.bandwidth_bytes_per_s * wired(here, degree) * share(here.contention, degree or here.size)
    return rate * here.efficiency * (num_bytes / (num_bytes + here.half_bytes) if num_bytes else 1.0)


def wired(here: Tier, degree: int) -> float:
    """Share of a tier's bandwidth that `degree` members (0: all) can use: only the links among them count."""
    if here.by_degree:
        return here.by_degree[min(degree or here.size, len(here.by_degree) + 1) - 2] if degree != 1 else 1.0
    # Devices wired in pairs share their bandwidth among size - 1 links.
    if here.direct and degree > 1 and here.size > 1:
        return min(1.0, (degree - 1) / (here.size - 1))
    return 1.0


def hop_s(cluster: Cluster, tier: int, degree: int, num_bytes: float) -> float:
    """Seconds of a hop in which each of `degree` members of a tier sends `num_bytes` in total to the others.

    (degree - 1) latency + bytes / rate, at the rate of the whole message, or the seconds of a tree if less.
    """
    # The rate depends on the whole message, of which a rank sends all parts but one.
    whole = num_bytes * degree / (degree - 1) if degree > 1 else num_bytes
    rate = rate_bytes_per_s(cluster, tier, whole, degree=degree)
    ring_s = (degree - 1) * cluster.tiers[tier].latency_s + num_bytes / rate
    tree = cluster.tiers[tier].tree
    if tree is None or degree < 2:
        return ring_s
    return min(ring_s, tree.latency_s(degree) + num_bytes / (rate * tree.share))


def exchange_tiers(cluster: Cluster, degrees: Group, sends: Iterable[tuple[int, int]]) -> dict[int, float]:
    """Seconds by tier index of an exchange in which each rank sends `sends`, pairs of (tier, bytes).

    Messages to all peers start together, so a tier's latency counts once; tiers follow each other. The launch is
    charged to the first tier.
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
    # A tier without a penalty uses the device's.
    own = cluster.tiers[tier].overlap_penalty
    return cluster.device.overlap_penalty if own is None else own


def send_s(cluster: Cluster, tier: int, num_bytes: float) -> float:
    """Seconds of a point-to-point message of `num_bytes` across a tier."""
    if not num_bytes:
        return 0.0
    here = cluster.tiers[tier]
    rate = rate_bytes_per_s(cluster, tier, num_bytes, degree=2)
    return here.latency_s + num_bytes / rate + cluster.device.kernels.launch_s


def coding_s(cluster: Cluster, num_bytes: float) -> float:
    """Seconds of coding and decoding that read and write `num_bytes` of memory."""
    # The codec occupies the rank, not a tier.
    return num_bytes / (cluster.device.memory_bandwidth_bytes_per_s * cluster.device.kernels.codec)


def latency_and_rate(small_bytes: float, small_s: float, large_bytes: float, large_s: float) -> tuple[float, float]:
    """(Latency in seconds, bandwidth in bytes/s) from the seconds of a small and a large message to one neighbour."""
    if large_s <= small_s:  # noise hides the slope: all of the larger message's time counts as bandwidth
        return 0.0, large_bytes / large_s
    bandwidth = (large_bytes - small_bytes) / (large_s - small_s)
    return max(0.0, small_s - small_bytes / bandwidth), bandwidth
