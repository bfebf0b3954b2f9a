"""Topology of an emulated cluster: bridges, links, rates and routes, as plain values.

Every tier of size above 1 is a network of its own, as on machines with separate adapters for separate links: a rank has
one interface `t<k>` per tier, and two ranks communicate over the outermost tier on which they differ. So the counter of
an interface is exactly its rank's traffic on that tier.

    not shared                         shared

    island b<k>n<i>: a bridge          island b<k>n<i>: a bridge
      |       |       |                  | uplink (limited)      | uplink (limited)
     port    port    port              group g<k>n<j>          group g<k>n<j+1>
      |       |       |  (limited)       |       |               |       |
     t<k>    t<k>    t<k>               t<k>    t<k>            t<k>    t<k>

An island is one group of tier k; the groups in it are groups of tier k-1. The bridges of a tier form trees, so no frame
can circle. This module touches no machine: see `terrace/lab/rehearse/network.py`.
"""

import math
from dataclasses import dataclass

from terrace.base.errors import ClusterError, ConfigError
from terrace.cluster.cluster import Cluster, Tier

# A software network of one machine moves 1 to 2 GB/s per stream; a limit above that would only cost time.
FASTEST_BYTES_PER_S = 1.5e9
# Below this a frame takes longer than TCP's retransmission timeout.
SLOWEST_BYTES_PER_S = 2e4
# A virtual link takes some 50 us by itself, and far more on busy cores: a shorter delay would not be visible.
SHORTEST_DELAY_S = 5e-4

MAX_RANKS = 64
_ADDRESSES_A_BYTE = 250


@dataclass(frozen=True, kw_only=True)
class Port:
    """The link of one rank into a tier: `t<k>` in the rank's namespace, `name` in the fabric's."""

    rank: int
    interface: str
    name: str
    bridge: str
    rate_bytes_per_s: float  # of each direction; inf: not limited
    delay_s: float  # added on the way out of the rank; 0: the kernel's own


@dataclass(frozen=True, kw_only=True)
class Uplink:
    """The link that a group shares: `lower` is its end at the group's bridge, `upper` at the island's."""

    group: int
    ranks: tuple[int, ...]
    lower: str
    lower_bridge: str
    upper: str
    upper_bridge: str
    rate_bytes_per_s: float


@dataclass(frozen=True, kw_only=True)
class TierNet:
    index: int
    tier: Tier  # with scaled figures
    bridges: tuple[str, ...]
    ports: tuple[Port, ...]
    uplinks: tuple[Uplink, ...]

    @property
    def interface(self) -> str:
        return f"t{self.index}"

    @property
    def rate_bytes_per_s(self) -> float:
        """Rate of one limited link in one direction: a rank's, or a sharing group's uplink. inf: not limited."""
        return self.uplinks[0].rate_bytes_per_s if self.uplinks else self.ports[0].rate_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class Wiring:
    """Networks of all tiers at a scale, innermost first; tiers of size 1 have none."""

    cluster: Cluster  # as described
    scale: float
    nets: tuple[TierNet, ...]

    @property
    def ranks(self) -> range:
        return range(self.cluster.world_size)

    def net(self, index: int) -> TierNet:
        """Network of tier `index`, which must have more than one member."""
        return next(net for net in self.nets if net.index == index)

    def address(self, rank: int) -> str:
        """IP address of a rank, the same on every interface."""
        high, low = divmod(rank, _ADDRESSES_A_BYTE)
        return f"10.99.{high}.{low + 1}"

    def mac(self, rank: int, index: int) -> str:
        """Hardware address of a rank's interface into tier `index`; the leading 02 marks it as locally administered."""
        high, low = divmod(rank, 256)
        return f"02:00:00:{index:02x}:{high:02x}:{low:02x}"

    def between(self, rank: int, other: int) -> int:
        """Index of the outermost tier on which two ranks differ; -1 for a rank and itself."""
        here, there = self.cluster.coordinates(rank), self.cluster.coordinates(other)
        return max(
            (index for index, pair in enumerate(zip(here, there, strict=True)) if pair[0] != pair[1]), default=-1
        )


def wire(cluster: Cluster, scale: float) -> Wiring:
    """Lay out the networks of `cluster` with every bandwidth multiplied and every latency divided by `scale`.

    Raises `ConfigError` for a scale that is not a positive number and `ClusterError` for a cluster that cannot be
    emulated.
    """
    if not (math.isfinite(scale) and scale > 0):
        raise ConfigError(f"--scale {scale} must be a number above 0: 0.1 makes every link ten times slower")
    if cluster.world_size > MAX_RANKS:
        raise ClusterError(
            f"cluster {cluster.name!r} has {cluster.world_size} ranks, and one machine emulates at most {MAX_RANKS}: "
            f"resize a tier, for example --cluster.tiers.{cluster.tiers[-1].name}.size 1"
        )
    nets = tuple(_net(cluster, index, scale) for index, tier in enumerate(cluster.tiers) if tier.size > 1)
    return Wiring(cluster=cluster, scale=scale, nets=nets)


def _net(cluster: Cluster, index: int, scale: float) -> TierNet:
    tier = _scaled(cluster.tiers[index], scale)
    below, within = cluster.sharers(index), cluster.ranks_within(index)
    shares = tier.shared and below > 1  # a group of one has its link to itself
    # A tier's bandwidth is one rank's share; an uplink carries the shares of its whole group.
    limit = _limit(tier.bandwidth_bytes_per_s * (below if shares else 1))
    delay_s = tier.latency_s if tier.latency_s >= SHORTEST_DELAY_S else 0.0
    islands = tuple(f"b{index}n{island}" for island in range(cluster.world_size // within))
    groups = tuple(f"g{index}n{group}" for group in range(cluster.world_size // below)) if shares else ()
    ports = tuple(
        Port(
            rank=rank,
            interface=f"t{index}",
            name=f"p{index}r{rank}",
            bridge=groups[rank // below] if shares else islands[rank // within],
            rate_bytes_per_s=math.inf if shares else limit,
            delay_s=delay_s,
        )
        for rank in range(cluster.world_size)
    )
    uplinks = tuple(
        Uplink(
            group=group,
            ranks=tuple(range(group * below, (group + 1) * below)),
            lower=f"u{index}n{group}",
            lower_bridge=bridge,
            upper=f"d{index}n{group}",
            upper_bridge=islands[group * below // within],
            rate_bytes_per_s=limit,
        )
        for group, bridge in enumerate(groups)
    )
    return TierNet(index=index, tier=tier, bridges=(*islands, *groups), ports=ports, uplinks=uplinks)


def _scaled(tier: Tier, scale: float) -> Tier:
    bandwidth = tier.bandwidth_bytes_per_s * scale
    if bandwidth < SLOWEST_BYTES_PER_S:
        raise ClusterError(
            f"tier {tier.name!r} at scale {scale:g} has {bandwidth:g} bytes/s, and links below "
            f"{SLOWEST_BYTES_PER_S:g} bytes/s cannot be emulated: use a --scale of at least "
            f"{SLOWEST_BYTES_PER_S / tier.bandwidth_bytes_per_s:.1g}"
        )
    return Tier(
        name=tier.name,
        size=tier.size,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=tier.latency_s / scale,
        shared=tier.shared,
        source=tier.source,
    )


def _limit(rate_bytes_per_s: float) -> float:
    return rate_bytes_per_s if rate_bytes_per_s < FASTEST_BYTES_PER_S else math.inf
