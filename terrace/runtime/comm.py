"""Communication of one rank under a program: groups, lanes, ledger, and the collectives that use them."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from terrace.comm.collectives import Collectives
from terrace.comm.exchange import gather_plain, gather_tensors
from terrace.comm.group_p2p import GroupP2P
from terrace.comm.groups import Meeting, TierGroups, Timeouts
from terrace.comm.lane import Lane, make_lane
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import UNPACED, Pace
from terrace.comm.process_group import new_group
from terrace.comm.stage_p2p import StageP2P
from terrace.plan.context import ContextGroup, is_context_parallel
from terrace.plan.edges import rounds_of
from terrace.plan.layout import INSIDE, Layout, island_ranks
from terrace.plan.wire import BETWEEN_STAGES
from terrace.program.instruction import Instruction, Op
from terrace.program.program import Program
from terrace.program.transfers import transfers_of

# Ranks meet in an exchange after slow writes.
_EXCHANGE_TIMEOUTS = 5


class Comm:
    """Owns the process groups, lanes and collectives of one rank, and counts the bytes that it sends.

    Every rank of the world constructs one at the same point, from programs of the same plan; `torch.distributed` must
    be initialised when the world has more than one rank. `pacer` limits messages to the rates of their tiers. `meter`
    counts memory: of messages here, of model state elsewhere.
    """

    def __init__(
        self,
        program: Program,
        rank: int = 0,
        device: torch.device | str = "cpu",
        *,
        timeout: timedelta | Timeouts = timedelta(minutes=10),
        pacer: Pace = UNPACED,
    ) -> None:
        self.program, self.rank, self.device, self.pacer = program, rank, torch.device(device), pacer
        self.ledger, self.meter = Ledger(), Meter()
        cluster, tiers = program.cluster, program.layout.tiers
        self.context_group = (
            ContextGroup.of(cluster, program.plan, rank) if is_context_parallel(program.mesh, program.plan) else None
        )
        timeouts, inside = Timeouts.of(timeout), tuple(island_ranks(program.model.world_layout, rank))
        has_islands = len(inside) < cluster.world_size
        # Inside an island, too: a rank there may wait for one that awaits an exchange.
        self.groups = self._tier_groups(timeouts.apart if has_islands else timeouts.together)
        self.collectives = self._collectives(self.ledger, self.meter)
        self.stages = self.stage_p2p(self.ledger, pacer)
        self.members: GroupP2P | None = None  # of the context group
        if self.context_group is not None:
            member = self.context_group.members.index(rank)
            self.members = GroupP2P(
                self.groups, self.context_group, member, tiers=tiers, ledger=self.ledger, pacer=pacer
            )
        # Messages of tensor and context ranks have their own lane: they must not queue behind a block's gather or
        # reduction.
        has_inside = program.model.tensor.degree > 1 or self.context_group is not None
        indexes = {*self.groups.lanes} | ({INSIDE} if has_inside else set())
        self.lanes: dict[int, Lane] = {lane: make_lane(self.device) for lane in sorted(indexes)}
        self._peers: dict[tuple[tuple[int, Layout], ...], tuple[int, ...]] = {}
        # Separate groups, because the world's may have no timeout.
        limit = _EXCHANGE_TIMEOUTS * timeouts.together
        apart = limit + timeouts.apart if has_islands else limit
        self._world = new_group(None, apart) if cluster.world_size > 1 else None
        self._inside = self._world
        if has_islands:
            self._inside = new_group(inside, limit)

    def stage_p2p(self, ledger: Ledger, pacer: Pace = UNPACED) -> StageP2P:
        """Point-to-point messages between stages, counted in `ledger`. The caller closes it."""
        program = self.program
        return StageP2P(self.groups, program.mesh, self.rank, tiers=program.layout.tiers, ledger=ledger, pacer=pacer)

    def exchange(self, value: Any) -> list[Any]:
        """Gather `value`, small and JSON-serializable, from every rank, in rank order. Every rank calls this."""
        return [value] if self._world is None else gather_plain(value, self.device, self._world)

    def exchange_inside(self, value: Any) -> list[Any]:
        """As `exchange`, among the ranks that step together with this one: its island, or all."""
        return [value] if self._inside is None else gather_plain(value, self.device, self._inside)

    def exchange_tensors(self, tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Gather the CPU tensors of every rank, in rank order. Every rank calls this."""
        return [list(tensors)] if self._world is None else gather_tensors(tensors, self.device, self._world)

    def of_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """Broadcast rank 0's CPU tensor; other ranks pass one of its shape and dtype. Every rank calls this."""
        if self._world is None:
            return tensor
        there = tensor.to(self.device)
        dist.broadcast(there, 0, group=self._world)
        return there.cpu()

    def participants(self, instruction: Instruction) -> tuple[int, ...]:
        """The ranks that take part in a message, sorted, for the watchdog to report."""
        if instruction.peer >= 0:
            return tuple(sorted((self.rank, self.program.peer(self.rank, instruction))))
        if instruction.op is Op.OUTER_COUNT:
            return tuple(range(self.program.cluster.world_size))
        key = self.program.message(instruction).collectives
        if key not in self._peers:
            # Ranks reached over all tiers of the message, tier by tier.
            ranks = [self.rank]
            for tier, layout in key:
                ranks = [peer for each in ranks for peer in layout.peers(each, tier)]
            self._peers[key] = tuple(sorted(ranks))
        return self._peers[key]

    def close(self) -> None:
        """Stop the lanes. The process groups are not destroyed."""
        # After a failure a lane may be waiting for a rank that has exited.
        failed = self.stages.failed or any(lane.failed for lane in self.lanes.values())
        for lane in self.lanes.values():
            lane.close(wait=not failed)
        self.stages.close(wait=not failed)
        self.groups.leave()

    def _collectives(self, ledger: Ledger, meter: Meter) -> Collectives:
        model = self.program.model
        return Collectives(self.groups, model.stage_layout, model.plan, ledger, meter, self.device, self.pacer)

    def _tier_groups(self, timeout: timedelta) -> TierGroups:
        program, rank = self.program, self.rank
        return TierGroups(
            transfers_of(program),
            rank,
            timeout,
            list(_meetings(program, rank)),
            () if self.context_group is None else self.context_group.members,
            again=any(
                wire.packed
                for message in BETWEEN_STAGES
                for tier in program.layout.tiers
                for wire in program.plan.wire_formats(message, tier)
            ),
        )


def _meetings(program: Program, rank: int) -> Iterator[Meeting]:
    # Round by round, the rank of another stage that this one exchanges messages with; only itself where none.
    for number, pairs in enumerate(rounds_of(program.stage.pairs)):
        partners = {stage: other for pair in pairs for stage, other in (pair, pair[::-1])}
        stage = program.stage.index
        ranks = {rank, program.mesh.at_stage(rank, partners.get(stage, stage))}
        yield (number, pairs, program.mesh), tuple(sorted(ranks))
