"""Process groups by tier.

A rank belongs to one group per tier: the ranks that differ from it on that tier only, in tier order.
Each group costs threads and file descriptors on gloo, so a tier on which a rank has no peer gets none,
only members take part in the creation of a group, and groups are kept for as long as the world they were
made in: torch names a group after its ranks, and making one again under a used name would hang.
"""

from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from terrace.cluster import Cluster
from terrace.plan import Layout

_made: "WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], dist.ProcessGroup]]" = WeakKeyDictionary()


@dataclass(frozen=True)
class TierGroup:
    """The peers of a rank on one tier. `handle` is None on a tier without peers."""

    tier: str
    ranks: tuple[int, ...]
    position: int  # of this rank in `ranks`
    handle: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)


class TierGroups:
    """All groups of one rank, by tier index."""

    def __init__(self, cluster: Cluster, layout: Layout, rank: int, timeout: timedelta) -> None:
        """Create the groups. Every rank of the world calls this at the same point."""
        self.coordinates = cluster.coordinates(rank)
        self.backend = dist.get_backend() if cluster.world_size > 1 else "none"
        self._groups = []
        for index, name in enumerate(layout.tiers):
            peers = cluster.peers(rank, index)
            handle = _group(peers, timeout) if layout.degrees[index] > 1 else None
            self._groups.append(TierGroup(name, peers, self.coordinates[index], handle))

    def __getitem__(self, index: int) -> TierGroup:
        return self._groups[index]


def _group(ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    groups = _made.setdefault(world, {})
    if ranks not in groups:
        groups[ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return groups[ranks]
