"""Hands the parameters of an engine over to replicas for generation, between two steps.

Its instructions are a program (terrace.program.hand_over), verified before the first hand-over and run by `play`
(terrace.runtime.reshard_messages); its bytes are declared to the engine. A rank sends values from its part of the flat
buffers, or from its slices if they came over an outer tier, and holds the messages of one instruction a lane at a time.
Values travel in the dtype of the working copies (message class `reshard`): copies of these, or of the masters, rounded
as a refresh and the gather of a forward round them, so that what generates is what trains.
"""

from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Literal

from torch import Tensor

from terrace.base.boxes import overlap
from terrace.base.boxes import within as inside
from terrace.base.errors import PlanError
from terrace.comm.process_group import OrderedGroup, new_group
from terrace.plan.layout import island_ranks, message_tiers
from terrace.plan.transition import Transition
from terrace.plan.wire import MessageClass
from terrace.program.hand_over import hand_over_program
from terrace.program.program import Program
from terrace.program.verify_hand_over import verify_hand_over
from terrace.runtime.engine import Engine
from terrace.runtime.forward_values import gather_of
from terrace.runtime.reshard_messages import BlockParts, Slices, boxes_of, held_boxes, play, within

# A flat buffer without memory, and its boxes, each with its values elsewhere.
_Loan = tuple[Tensor, list[tuple[Tensor, Tensor]]]


class HandOver:
    """The hand-over of one rank's engine. Every rank of the world has one and calls its methods at the same points.

    `group` has the ranks of this rank's replica in the order of their slices, None of one rank.
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
        and for masters whose refresh rounds the values that others get.
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
        self._groups = {tier: new_group(None, timeout) for tier in tiers}
        (own,) = (replica for replica in self.transition.replicas if self._rank in replica)
        self.group = OrderedGroup.of(own, timeout) if rows > 1 else None

    @property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Bytes that this rank sends in a hand-over, by message class and tier."""
        return self.program.sent_bytes

    def run(self, *, lend: bool = False) -> list[Slices]:
        """This rank's slices of every block's parameters, as the forwards of the next step have them.

        With `lend`, a flat buffer whose parameters all lie in these slices gives up its memory; the engine takes it
        back, with the values, when it is next used. On tensor x pipeline ranks a rank thus has its slices alone, M/g,
        and never more than one block's own part beside those it has made. Slices must keep their values till then.
        """
        self._engine.settle()
        # A refresh writes into flat buffers, which a loan leaves without memory.
        if lend or self._source == "params":
            self._engine.drain()
        self._engine.runner.declared_bytes.update(self.sent_bytes)
        parts, loans = list[BlockParts](), list[_Loan]()
        # Before the first loan: after a failure at a later block the engine has them back.
        if lend:
            self._engine.state.lent = partial(_take_back, loans)
        for block in range(len(self.transition.alike)):
            parts.append(self._parts(block))
            if lend:
                self._lend(block, parts[-1], loans)
        comm = self._engine.comm
        exchanges = {tier: within(group) for tier, group in self._groups.items()}
        play(self.program, parts, exchanges, comm.device, comm.ledger, comm.pacer)
        return [own.slices for own in parts]

    def _parts(self, block: int) -> BlockParts:
        """Boxes of a block that this rank holds, and its slices, filled where it holds them."""
        return BlockParts.of(
            self.transition, block, self._rank, held_boxes(self._engine, block, self._source), self._engine.comm.device
        )

    def _lend(self, block: int, parts: BlockParts, loans: list["_Loan"]) -> None:
        """Take the memory of working copies that the slices have; the parts to send are read there.

        Where a gather rounds, slices have other values than the working copy, which then stays.
        """
        for flat in self._engine.state.flats.get(block, ()):
            if gather_of(self._engine, block, flat) is not None:
                continue
            own = boxes_of(self._engine, flat, flat.part(flat.layout.params).start, flat.shard)
            if all(name in parts.boxes and overlap(box, parts.boxes[name]) == box for name, box, _ in own):
                loan = [(values, parts.slices[name][inside(box, parts.boxes[name])]) for name, box, values in own]
                # Of masters a rank may hold less, and the rest would be there only after the messages.
                for values, elsewhere in loan:
                    elsewhere.copy_(values)
                loans.append((flat.shard, loan))
                flat.shard.untyped_storage().resize_(0)


def _take_back(loans: Sequence[_Loan]) -> None:
    for buffer, boxes in loans:
        buffer.untyped_storage().resize_(buffer.nbytes)
        buffer.zero_()  # padding
        for values, elsewhere in boxes:
            values.copy_(elsewhere)


def _check_exact(program: Program) -> None:
    layout = program.layout
    for place in message_tiers(layout, MessageClass.GATHER):
        gather = program.plan.wire_format(MessageClass.GATHER, layout.tiers[place])
        if gather.block:
            raise PlanError(
                f"gathers travel as {gather.name} over {layout.tiers[place]}, in blocks of working copies, of which "
                'masters are parts: hand over from "params", or leave the format out'
            )
    for tier in program.cluster.tiers:
        wire = program.plan.wire_format(MessageClass.REFRESH, tier.name)
        if wire.name != program.plan.compute:
            raise PlanError(
                f"refreshes travel as {wire.name} over {tier.name} and parameters are {program.plan.compute}, so ranks "
                'train with other values than their masters: hand over from "params", or leave the format out'
            )
