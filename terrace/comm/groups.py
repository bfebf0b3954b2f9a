"""Process groups by lane and tier.

The peers of a rank on a tier are the ranks that differ from it on that tier and on some axes only, in tier order. A
lane is named after the outermost tier its messages cross (terrace.program), and each lane has groups of its own,
since lanes run side by side and a group carries one collective after the other.

Each group costs threads and file descriptors on gloo, so only the pairs of lane and tier that some message
uses get one, only members take part in the creation of a group, and groups are kept for as long as the world
they were made in: torch names a group after its ranks and the number of groups before, so all ranks make
the same ones in the same order.
"""

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from terrace.plan import Layout, MessageClass
from terrace.plan.layout import INSIDE, message_tiers

Meeting = tuple[Hashable, tuple[int, ...]]  # what is the same on all ranks that meet at once; the ranks that meet
_Made = dict[tuple[Hashable, tuple[int, ...]], dist.ProcessGroup]  # by lane and ranks
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
    """All groups of one rank, by lane, axes and tier. `lanes` are those that carry something."""

    def __init__(
        self,
        layout: Layout,
        rank: int,
        timeout: timedelta,
        parts: Collection[Layout] = (),
        lines: Collection[Layout] = (),
        world: Layout | None = None,
        meetings: Sequence[Meeting] = (),
        pool: Sequence[int] = (),
    ) -> None:
        """Create the groups. Every rank of the world calls this at the same point.

        `layout` is that of all ranks that hold some part of a block together, `parts` those of the flat buffers where
        they are others, `lines` the ranks of the tensor axis. Of a pipeline, `world` is all ranks and `meetings` says
        with which rank of another stage this one exchanges messages, if with any, round by round. `pool` is the ranks
        that attend together with this one, itself included.
        """
        self.backend = dist.get_backend() if dist.is_initialized() else "none"
        self._axes = layout.axes
        self._groups: dict[tuple[int, tuple[str, ...], int], TierGroup] = {}
        self.lanes = sorted({lane for lane, _ in _used(layout)})
        for part in {each.axes: each for each in (layout, *parts)}.values():
            for lane, tier in _used(layout):
                self._add(lane, part, tier, rank, timeout)
        for line in lines:
            for tier in range(len(line.tiers)):
                self._add(INSIDE, line, tier, rank, timeout)
        if world is not None and meetings:
            crossed = message_tiers(world, MessageClass.CONTROL)
            self.lanes = sorted({*self.lanes, max(crossed)})
            for tier in crossed:
                self._add(max(crossed), world, tier, rank, timeout)
        # A group for each pair of ranks and direction: on NCCL the messages of a group are carried one after the other,
        # so that a receive which was posted early would hold up what is sent meanwhile. Whoever has no partner in a
        # round makes a group of its own, so that all ranks make as many.
        self._pairs: dict[tuple[int, bool], dist.ProcessGroup] = {}
        for meeting, ranks in meetings:
            for upward in (True, False):
                handle = _group((meeting, upward), ranks, timeout)
                self._pairs |= {(peer, upward): handle for peer in ranks if peer != rank}
        self._pool = _group("pool", tuple(pool), timeout) if pool else None

    def __getitem__(self, lane_and_tier: tuple[int, int]) -> TierGroup:
        lane, tier = lane_and_tier
        return self._groups[lane, self._axes, tier]

    @property
    def pool(self) -> dist.ProcessGroup:
        """The group of the ranks that attend together."""
        assert self._pool is not None, "only where tokens are spread over ranks is there one"
        return self._pool

    def between(self, peer: int, upward: bool) -> dist.ProcessGroup:
        """Return the group of what goes between this rank and `peer` to the higher stage of both, or to the lower."""
        return self._pairs[peer, upward]

    def of(self, lane: int, axes: tuple[str, ...], tier: int) -> TierGroup:
        """Return the peers on a tier among the ranks that differ on `axes`, for messages of a lane."""
        return self._groups[lane, axes, tier]

    def _add(self, lane: int, layout: Layout, tier: int, rank: int, timeout: timedelta) -> None:
        if layout.degrees[tier] > 1:
            peers = layout.peers(rank, tier)
            self._groups[lane, layout.axes, tier] = TierGroup(
                layout.tiers[tier], peers, layout.coordinates(rank)[tier], _group(lane, peers, timeout)
            )


def _used(layout: Layout) -> list[tuple[int, int]]:
    """Return the pairs of lane and tier on which some message travels, the same list on every rank."""
    pairs = set()
    for message in MessageClass:
        crossed = message_tiers(layout, message)
        pairs |= {(max(crossed), tier) for tier in crossed}
    return sorted(pairs)


def _group(lane: Hashable, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    groups = _made.setdefault(world, {})
    if (lane, ranks) not in groups:
        groups[lane, ranks] = dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    return groups[lane, ranks]
