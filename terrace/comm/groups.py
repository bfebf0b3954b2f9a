"""Process groups by lane and tier.

The peers of a rank on a tier are the ranks that differ from it only on that tier and on some axes, in tier order. A
lane is named after the outermost tier its messages cross (terrace.program), and each lane has its own groups, since
lanes run concurrently and a group runs one collective at a time.

Each group costs threads and file descriptors on gloo. So only pairs of lane and tier used by some message get one,
only members take part in its creation, and groups are kept for the lifetime of their world. Torch names a group after
its ranks and the number of groups before it, so all ranks create the same groups in the same order.

Engines of one process, such as colocated roles, therefore share groups. Their lanes keep no order between them, so an
engine takes the groups over when it runs, which waits for the messages of the engine before it.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import product
from typing import NamedTuple
from weakref import WeakKeyDictionary, WeakMethod

import torch.distributed as dist

from terrace.comm.process_group import new_group
from terrace.plan.layout import INSIDE, Layout
from terrace.plan.mesh import Mesh
from terrace.program.message import Transfer

Meeting = tuple[Hashable, tuple[int, ...]]  # (a key, the same on all ranks that meet at once; the ranks that meet)
_Made = dict[tuple[Hashable, tuple[int, ...]], dist.ProcessGroup]  # by lane and ranks
_Key = tuple[int, tuple[Mesh | None, tuple[str, ...]], int]  # lane, the ranks joined, tier
_made: "WeakKeyDictionary[dist.ProcessGroup, _Made]" = WeakKeyDictionary()
_users: "WeakKeyDictionary[dist.ProcessGroup, tuple[TierGroups, WeakMethod[Callable[[], None]]]]" = WeakKeyDictionary()


class Timeouts(NamedTuple):
    """Limits on a message's time: if all ranks step together, and under islands, which may drift apart."""

    together: timedelta
    apart: timedelta

    @staticmethod
    def of(timeout: "timedelta | Timeouts") -> "Timeouts":
        """A single limit applies to both."""
        return timeout if isinstance(timeout, Timeouts) else Timeouts(timeout, timeout)


@dataclass(frozen=True)
class TierGroup:
    tier: str
    ranks: tuple[int, ...]
    position: int  # of this rank in `ranks`
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        return len(self.ranks)


class TierGroups:
    """All groups of one rank, by lane, joined ranks and tier. `lanes` are those in use, by tier."""

    def __init__(
        self,
        transfers: Iterable[Transfer],
        rank: int,
        timeout: timedelta,
        meetings: Sequence[Meeting] = (),
        pool: Sequence[int] = (),
        *,
        again: bool = False,
    ) -> None:
        """Create the groups. Every rank of the world calls this at the same point.

        `transfers` are the plan's collectives on every route, equal on all ranks. In a pipeline, `meetings` lists for
        each round the rank of another stage that this one exchanges messages with, if any. `pool` are the ranks that
        attend together with this one, itself included. With `again`, each meeting has groups for plain values after
        packed messages.
        """
        self.backend = dist.get_backend() if dist.is_initialized() else "none"
        routes: dict[_Key, Layout] = {}
        for transfer in transfers:
            routes |= {(transfer.lane, transfer.ranks.joined, hop.tier): transfer.ranks for hop in transfer.hops}
        self.lanes = sorted({lane for lane, _, _ in routes} - {INSIDE})
        self._groups: dict[_Key, TierGroup] = {}
        # Sorted, since all ranks must create the groups in the same order.
        for key, ranks in sorted(routes.items(), key=_order):
            lane, _, tier = key
            peers = ranks.peers(rank, tier)
            handle = _group(lane, peers, timeout)
            self._groups[key] = TierGroup(ranks.tiers[tier], peers, ranks.coordinates(rank)[tier], handle)
        # One group per pair of ranks and direction: on NCCL the messages of a group run one after the other, so a
        # receive posted early would delay later sends. A rank without a partner in a round creates a group of one, so
        # that all ranks create the same number.
        self._pairs: dict[tuple[int, bool, bool], dist.ProcessGroup] = {}
        for meeting, members in meetings:
            # One group per direction: sends of both sides would otherwise share an order, as would plain values with
            # the packed messages whose receives are posted ahead.
            for after, upward in product((False, True) if again else (False,), (True, False)):
                handle = _group((meeting, upward, after), members, timeout)
                self._pairs |= {(peer, upward, after): handle for peer in members if peer != rank}
        self._pool = _group("pool", tuple(pool), timeout) if pool else None

    def take_over(self, drain: Callable[[], None]) -> None:
        """Wait for the messages of the user before; `drain` is the method that will wait for those of this one."""
        if (world := dist.group.WORLD) is None:
            return
        user, before = _users.get(world, (self, None))
        if user is not self and before is not None and (waits := before()) is not None:
            waits()
        _users[world] = self, WeakMethod(drain)

    def leave(self) -> None:
        """Let the next user wait for nothing of this one, which has completed or failed."""
        world = dist.group.WORLD
        if world is not None and world in _users and _users[world][0] is self:
            del _users[world]

    @property
    def pool(self) -> dist.ProcessGroup:
        assert self._pool is not None, "only where tokens are spread over ranks is there one"
        return self._pool

    def between(self, peer: int, upward: bool, *, again: bool = False) -> dist.ProcessGroup:
        """Group of messages between this rank and `peer`, in the direction of the higher stage if `upward`."""
        return self._pairs[peer, upward, again]

    def of(self, lane: int, ranks: Layout, tier: int) -> TierGroup:
        return self._groups[lane, ranks.joined, tier]


def _order(route: tuple[_Key, Layout]) -> tuple[object, ...]:
    (lane, (mesh, axes), tier), _ = route
    return lane, axes, tier, mesh and mesh.degrees


def _group(lane: Hashable, ranks: tuple[int, ...], timeout: timedelta) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "torch.distributed is not initialised"
    groups = _made.setdefault(world, {})
    # Local synchronisation: only members take part, so that disjoint groups are made at the same time.
    if (lane, ranks) not in groups:
        groups[lane, ranks] = new_group(ranks, timeout)
    return groups[lane, ranks]
