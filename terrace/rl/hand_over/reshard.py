"""Sends the parameters of an engine to generation replicas, between two steps.

The messages are a program (terrace.rl.hand_over.program), verified once and run by `play`
(terrace.rl.hand_over.messages); its bytes are declared to the engine. A rank sends values from its shard of the
flat buffers, or from its slices if they came over an outer tier, and holds one instruction's messages per lane at a
time. Values are in the dtype of the working copies (message class `reshard`), taken from these or from the masters,
and rounded like a refresh and the gather of a forward, so that generation sees the values that training does.
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
from terrace.plan.wire import MessageClass
from terrace.program.program import Program
from terrace.rl.hand_over.forward_values import gather_of
from terrace.rl.hand_over.messages import BlockParts, Slices, boxes_of, held_boxes, play, within
from terrace.rl.hand_over.program import hand_over_program
from terrace.rl.hand_over.transition import Transition
from terrace.rl.hand_over.verify import verify_hand_over
from terrace.runtime.engine import Engine

# A flat buffer without memory, and its boxes, each with its values elsewhere.
_Loan = tuple[Tensor, list[tuple[Tensor, Tensor]]]


class HandOver:
    """Hand-over of one rank's engine. All ranks of the world construct one and call its methods at the same points.

    `group` is this rank's replica, with ranks in the order of their slices; None for a replica of one rank.
    """

    def __init__(
        self,
        engine: Engine,
        rows: int,
        timeout: timedelta = timedelta(minutes=10),
        source: Literal["params", "optimizer"] = "params",
    ) -> None:
        """Plan the hand-over to replicas of `rows` tensor ranks.

        `source` selects the working copies or the optimizer's masters. Masters need not wait for a refresh in flight,
        but a rank may hold fewer of them. Raises `PlanError` if blocks or ranks do not allow such replicas, and for
        masters if a gather or refresh format would give other ranks rounded values.
        """
        program, self._engine, self._rank = engine.program, engine, engine.rank
        if source == "optimizer":
            _check_exact(program)
        held: list[set[int]] = [set() for _ in range(program.stage.num_stages)]
        for stage, blocks in engine.comm.exchange([program.stage.index, list(program.stage.held)]):
            held[stage].update(blocks)
        specs = engine.state.specs
        self.transition = Transition.of(program.cluster, program.plan, specs, program.model.flats, held, rows, source)
        # Parameters differ between islands, so a replica must lie inside one. All replicas are checked, so that every
        # rank raises.
        for replica in self.transition.replicas:
            island = island_ranks(program.model.world_layout, replica[0])
            if not set(replica) <= set(island):
                raise PlanError(
                    f"replicas of {rows} tensor rows reach over islands of {len(island)} ranks, whose parameters "
                    "differ: use a number of rows that divides these"
                )
        self.program, self._source = hand_over_program(program.cluster, self.transition, self._rank), source
        verify_hand_over(self.program)
        # Separate groups, because the world's may have no timeout.
        tiers = sorted({each.tier for each in self.program.instructions})
        self._groups = {tier: new_group(None, timeout) for tier in tiers}
        (own,) = (replica for replica in self.transition.replicas if self._rank in replica)
        self.group = OrderedGroup.of(own, timeout) if rows > 1 else None

    @property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        return self.program.sent_bytes

    def run(self, *, lend: bool = False) -> list[Slices]:
        """Return this rank's slices of every block's parameters, with the values that the next step's forwards use.

        With `lend`, a flat buffer whose parameters all lie in these slices releases its memory; the engine restores
        it from them when it is next used, so slices must not change until then. On tensor x pipeline ranks a rank
        then holds just its slices, M/g, and at most one block's own shard besides.
        """
        self._engine.settle()
        # A refresh writes into flat buffers, which a loan leaves without memory; the host's cores change masters.
        if lend or self._source == "params" or self._engine.program.plan.keep.updates_on_host:
            self._engine.drain()
        self._engine.runner.declared_bytes.update(self.sent_bytes)
        parts, loans = list[BlockParts](), list[_Loan]()
        # Before the first loan: after a failure at a later block the engine has them back.
        if lend:
            self._engine.state.reclaim = partial(_take_back, loans)
        for block in range(len(self.transition.alike)):
            parts.append(self._parts(block))
            if lend:
                self._lend(block, parts[-1], loans)
        comm = self._engine.comm
        exchanges = {tier: within(group) for tier, group in self._groups.items()}
        play(self.program, parts, exchanges, comm.device, comm.ledger, comm.pacer)
        return [own.slices for own in parts]

    def _parts(self, block: int) -> BlockParts:
        """The boxes of a block that this rank holds, and its slices, filled where it holds their values."""
        return BlockParts.of(
            self.transition, block, self._rank, held_boxes(self._engine, block, self._source), self._engine.comm.device
        )

    def _lend(self, block: int, parts: BlockParts, loans: list["_Loan"]) -> None:
        """Release the working copies whose values the slices hold; values to send are then read from the slices.

        Where a gather rounds, slices differ from the working copy, which is then kept.
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
