"""Hands the parameters of an engine over to replicas for generation, between two steps.

    for one block of every stage, and then the next, from the outermost tier inward, each tier on a lane of its own:
        what goes to a peer -> one buffer -> sent and received all at once -> into the slices

The instructions are a program's (terrace.program.hand_over), which is verified before the first hand-over; its bytes
are declared to the engine. A rank sends from its part of the flat buffers, and from its slices what came over an outer
tier; it has the messages of one instruction a lane at a time. Values travel in the dtype of the working copies (message
class `reshard`), of which they are a copy, or of the masters, rounded as a refresh rounds them.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.base.boxes import Box, numel, overlap, sizes, within
from terrace.base.errors import PlanError
from terrace.comm.collectives import DTYPES
from terrace.comm.lane import Ticket, make_lane
from terrace.plan.handover import Move
from terrace.plan.holdings import flat_boxes
from terrace.plan.layout import island_ranks
from terrace.plan.slices import rank_slices
from terrace.plan.transition import Transition
from terrace.plan.wire import MessageClass
from terrace.program.hand_over import hand_over_program
from terrace.program.program import Program
from terrace.program.verify_hand_over import verify_hand_over
from terrace.runtime.engine import Engine
from terrace.runtime.flat_param import FlatParam
from terrace.runtime.gap_messages import behind

Slices = dict[str, Tensor]  # parameter -> this rank's slice of it
_Own = tuple[str, Box, Tensor]  # parameter, a box of it, its values in a flat buffer
_Loan = tuple[
    Tensor, list[tuple[Tensor, Tensor]]
]  # a flat buffer without memory, its boxes with their values elsewhere
_Key = tuple[int, torch.dtype]  # a peer, and what its message is made of


class HandOver:
    """The hand-over of one rank's engine. Every rank of the world has one and calls its methods at the same points.

    `replica` has the ranks of this rank's replica in the order of their slices, `group` is theirs, None of one rank.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        timeout: timedelta = timedelta(minutes=10),
        source: Literal["params", "optimizer"] = "params",
    ) -> None:
        """Plan it, to replicas of `rows` tensor ranks.

        `source` are the working copies, or the masters of the optimizer, which are there before a refresh under way has
        arrived, and of which a rank may have fewer. Raises `PlanError` where blocks or ranks cannot have such replicas,
        and for masters whose refresh rounds what others see.
        """
        program, self._engine, self._rank = engine.program, engine, engine.rank
        if source == "optimizer":
            _check_exact(program)
        held: list[set[int]] = [set() for _ in range(program.stage.num_stages)]
        for stage, blocks in engine.comm.exchange([program.stage.index, list(program.stage.held)]):
            held[stage].update(blocks)
        specs = engine.state.specs
        self.transition = Transition.of(program.cluster, program.plan, specs, program.flats, held, rows, source)
        # Elsewhere parameters are others; a replica inside an island has all it needs there.
        # All replicas, so that every rank raises.
        for replica in self.transition.replicas:
            island = island_ranks(program.world_layout, replica[0])
            if not set(replica) <= set(island):
                raise PlanError(
                    f"replicas of {rows} tensor rows reach over islands of {len(island)} ranks, whose parameters "
                    "differ: use a number of rows that divides these"
                )
        self.program, self._source = hand_over_program(program.cluster, self.transition, self._rank), source
        verify_hand_over(self.program)
        # Groups of its own, since the world's may have no timeout.
        tiers = sorted({each.tier for each in self.program.instructions})
        self._groups = {tier: dist.new_group(timeout=timeout) for tier in tiers}
        if self._groups and dist.get_backend() == "nccl":
            # All ranks of a group must take part in its first call there, and not all have messages at once.
            for group in self._groups.values():
                dist.all_reduce(torch.zeros(1, device=engine.comm.device), group=group)
        (self.replica,) = (replica for replica in self.transition.replicas if self._rank in replica)
        self.group: dist.ProcessGroup | None = None
        if rows > 1:
            self.group = dist.new_group(
                list(self.replica), timeout=timeout, use_local_synchronization=True, sort_ranks=False
            )

    @property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Bytes that this rank sends in a hand-over, by message class and tier."""
        return self.program.sent_bytes

    def run(self, *, lend: bool = False) -> list[Slices]:
        """This rank's slices of every block's parameters, as they are after the last step.

        With `lend`, a flat buffer whose parameters all lie in these slices gives up its memory; the engine takes it
        back, with the values, when it is next used. On tensor x pipeline ranks a rank thus has its slices alone, M/g,
        and never more than one block's own part beside those it has made. Slices must keep their values till then.
        """
        self._engine.state.recover()
        # A refresh writes into flat buffers, which a loan leaves without memory.
        if lend or self._source == "params":
            self._engine.drain()
        self._engine.runner.declared_bytes.update(self.sent_bytes)
        parts, loans = list[_Parts](), list[_Loan]()
        # Before the first loan: after a failure at a later block the engine has them back.
        if lend:
            self._engine.state.lent = partial(_take_back, loans)
        for block in range(len(self.transition.alike)):
            parts.append(self._parts(block))
            if lend:
                self._lend(block, parts[-1], loans)
        lanes = {tier: make_lane(self._engine.comm.device) for tier in self._groups}
        tickets = dict[tuple[int, ...], Ticket]()  # of the newest instruction of blocks
        try:
            for position, (blocks, tier) in enumerate(self.program.instructions):
                moves = [(parts[block], move) for block, move in self.program.moves[position]]
                work = partial(self._exchange, self.program.names[tier], moves, self._groups[tier])
                tickets[blocks] = lanes[tier].submit(behind(tickets.get(blocks), work))
            for ticket in tickets.values():
                ticket.wait()
        finally:
            # After a failure a lane may wait for a rank that is gone.
            failed = any(lane.failed for lane in lanes.values())
            for lane in lanes.values():
                lane.close(wait=not failed)
        return [own.slices for own in parts]

    def _parts(self, block: int) -> "_Parts":
        """Boxes of a block that this rank holds, and its slices, filled where it holds them."""
        state = self._engine.state
        dtypes = {name: DTYPES[dtype] for name, dtype in self.transition.dtypes[self.transition.alike[block]].items()}
        boxes = {name: own[0] for name, own in self.transition.needs(block)[self._rank].items()}
        slices = {
            name: torch.empty(sizes(box), dtype=dtypes[name], device=self._engine.comm.device)
            for name, box in boxes.items()
        }
        own = list[_Own]()
        for flat in state.flats.get(block, ()):
            own += self._boxes(flat, *self._held(flat))
        for name, box, values in own:
            common = overlap(box, boxes[name]) if name in boxes else None
            if common is not None:
                slices[name][within(common, boxes[name])] = values[within(common, box)]
        return _Parts(dtypes=dtypes, own=own, boxes=boxes, slices=slices)

    def _boxes(self, flat: FlatParam, start: int, held: Tensor) -> list["_Own"]:
        """Boxes of parameters in `held`, the elements of a flat buffer from `start` on."""
        slices_of, found = partial(rank_slices, mesh=self._engine.program.mesh, rank=self._rank), list[_Own]()
        for part in flat_boxes(flat.spec.params, start, start + held.numel(), slices_of):
            first = part.start - start
            values = held[first : first + numel(part.padded)].view(sizes(part.padded))
            found.append((part.param.name, part.whole, values[within(part.real, part.padded)]))
        return found

    def _lend(self, block: int, parts: "_Parts", loans: list["_Loan"]) -> None:
        """Take the memory of working copies that the slices have; what is sent of them is read there."""
        for flat in self._engine.state.flats.get(block, ()):
            own = self._boxes(flat, flat.part(flat.layout.params).start, flat.shard)
            if all(name in parts.boxes and overlap(box, parts.boxes[name]) == box for name, box, _ in own):
                loan = [(values, parts.slices[name][within(box, parts.boxes[name])]) for name, box, values in own]
                # Of masters a rank may hold less, and the rest would be there only after the messages.
                for values, elsewhere in loan:
                    elsewhere.copy_(values)
                loans.append((flat.shard, loan))
                flat.shard.untyped_storage().resize_(0)

    def _held(self, flat: FlatParam) -> tuple[int, Tensor]:
        """The values of a flat buffer that this rank sends from, and where they begin in it."""
        if self._source == "params" or flat.optimizer is None:
            return flat.part(flat.layout.params).start, flat.shard
        master = flat.optimizer.master
        return flat.part(flat.layout.optimizer).start, master.to(flat.shard.dtype)

    def _exchange(self, tier: str, moves: Sequence["_PartMove"], group: dist.ProcessGroup) -> None:
        """Send and receive `moves`, all over one tier: one message to each peer, or one a dtype."""
        sends, receives = defaultdict[_Key, list[_PartMove]](list), defaultdict[_Key, list[_PartMove]](list)
        for parts, move in moves:
            dtype = parts.dtypes[move.parameter]
            if move.source == self._rank:
                sends[move.target, dtype].append((parts, move))
            else:
                receives[move.source, dtype].append((parts, move))
        device, pacer = self._engine.comm.device, self._engine.comm.pacer
        leaving = {key: torch.cat([parts.read(move).reshape(-1) for parts, move in own]) for key, own in sends.items()}
        coming = {
            (peer, dtype): torch.empty(sum(numel(move.box) for _, move in own), dtype=dtype, device=device)
            for (peer, dtype), own in receives.items()
        }
        begin_s = 0.0 if pacer is None else pacer.begin()
        # All at once: one after the other, two ranks could each wait for the other's receive.
        operations = [dist.P2POp(dist.irecv, values, peer, group) for (peer, _), values in coming.items()]
        operations += [dist.P2POp(dist.isend, values, peer, group) for (peer, _), values in leaving.items()]
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        if leaving:
            sent_bytes = sum(values.nbytes for values in leaving.values())
            self._engine.comm.ledger.add(MessageClass.RESHARD, tier, sent_bytes)
            if pacer is not None:
                pacer.sent(tier, sent_bytes, 1, begin_s)
        for key, values in coming.items():
            pieces = torch.split(values, [numel(move.box) for _, move in receives[key]])
            for (parts, move), piece in zip(receives[key], pieces, strict=True):
                parts.place(move)[...] = piece.view(sizes(move.box))


def _take_back(loans: Sequence[_Loan]) -> None:
    for buffer, boxes in loans:
        buffer.untyped_storage().resize_(buffer.nbytes)
        buffer.zero_()  # padding
        for values, elsewhere in boxes:
            values.copy_(elsewhere)


def _check_exact(program: Program) -> None:
    for tier in program.cluster.tiers:
        wire = program.plan.wire_format(MessageClass.REFRESH, tier.name)
        if wire.name != program.plan.compute:
            raise PlanError(
                f"refreshes travel as {wire.name} over {tier.name} and parameters are {program.plan.compute}, so ranks "
                'train with other values than their masters: hand over from "params", or leave the format out'
            )


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """A rank's part of a block: (parameter, box, values) in its flat buffers, and by parameter its slice."""

    dtypes: dict[str, torch.dtype]
    own: list[_Own]
    boxes: dict[str, Box]
    slices: Slices

    def place(self, move: Move) -> Tensor:
        """The box of a move in the slice, which contains it."""
        return self.slices[move.parameter][within(move.box, self.boxes[move.parameter])]

    def read(self, move: Move) -> Tensor:
        """Values of a move that this rank sends."""
        # What a rank needs is in its slice by now; else it lies in its flat buffers, in one box or several.
        need = self.boxes.get(move.parameter)
        if need is not None and overlap(move.box, need) == move.box:
            return self.place(move)
        dtype, device = self.dtypes[move.parameter], self.own[0][2].device
        values = torch.empty(sizes(move.box), dtype=dtype, device=device)
        for name, box, held in self.own:
            common = overlap(box, move.box) if name == move.parameter else None
            if common is not None:
                values[within(common, move.box)] = held[within(common, box)]
        return values


_PartMove = tuple[_Parts, Move]
