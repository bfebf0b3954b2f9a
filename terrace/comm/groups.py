"""Process groups by lane and tier.

The peers of a rank on a tier are the ranks that differ from it on that tier only, in tier order. A lane is
named after the outermost tier its messages cross (terrace.program), and each lane has groups of its own,
since lanes run side by side and a group carries one collective after the other.

Each group costs threads and file descriptors on gloo, so only the pairs of lane and tier that some message
uses get one, only members take part in the creation of a group, and groups are kept for as long as the world
they were made in: torch names a group after its ranks and the number of groups before, so all ranks make
the same ones in the same order.
"""

from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from terrace.cluster import Cluster
from terrace.plan import Layout, MessageClass

_Made = dict[tuple[int, tuple[int, ...]], dist.ProcessGroup]  # by lane and ranks
_made: "WeakKeyDictionary[dist.ProcessGroup, _Made]" = WeakKeyDictionary()


@dataclass(frozen=True)
class TierGroup:
    """The peers of a rank on one tier, itself included."""

    tier: str
    ranks: tuple[int, ...]
    position: int  # of this rank in `ranks`
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class TierGroups:
    """All groups of one rank, by indexes of lane and tier. `lanes` are those that carry something."""

    def __init__(self, cluster: Cluster, layout: Layout, rank: int, timeout: timedelta) -> None:
        """Create the groups. Every rank of the world calls this at the same point."""
        self.backend = dist.get_backend() if cluster.world_size > 1 else "none"
        coordinates = cluster.coordinates(rank)
        self._groups = {}
        for lane, tier in _used(layout):
            peers = cluster.peers(rank, tier)
            self._groups[lane, tier] = TierGroup(
                layout.tiers[tier], peers, coordinates[tier], _group(lane, peers, timeout)
            )
        self.lanes = sorted({lane for lane, _ in self._groups})

    def __getitem__(self, lane_and_tier: tuple[int, int]) -> TierGroup:
        return self._groups[lane_and_tier]


def _used(layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs of lane and tier on which some message travels, the same list on every rank."""
    routes = [layout.route(message) for message in MessageClass]
    pairs = set()
    for route in routes:
        crossed = [tier for tier in route if layout.degrees[tier] > 1]
        pairs |= {(max(crossed), tier) for tier in crossed}
    return sorted(pairs)


def _group(lane: int, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    groups = _made.setdefault(world, {})
    if (lane, ranks) not in groups:
        groups[lane, ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return groups[lane, ranks]
