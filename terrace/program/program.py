"""The Program: what a rank does in one step, in order, with its messages and buffers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.hops import Hop
from terrace.plan.kept_rows import NO_ROWS, RowBytes
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.plan.plan import Plan
from terrace.plan.stage import SHORT, Stage
from terrace.plan.state_bytes import tie_bytes
from terrace.plan.wire import MessageClass
from terrace.program.boundaries import most_below
from terrace.program.buffers import Buffer, peak_bytes, state_buffers
from terrace.program.instruction import SPECS, Instruction, Op, Phase
from terrace.program.kept import kept_bytes, num_pieces, resting_bytes, rows_of
from terrace.program.message import Message
from terrace.program.report import StepReport, declared_ahead
from terrace.program.resolve import AGREED, control_message, counts_message, outer_numbers_message, stage_message
from terrace.program.segments import Segments, Unnumbered, without_micro

if TYPE_CHECKING:
    from terrace.program.sharded_model import ShardedModel


@dataclass(frozen=True, kw_only=True)
class Program:
    """The instructions of a rank for one step. All ranks of a stage share one Program object.

    `stage` selects the blocks of `model` that this program runs. The order of a long step is stored with its
    repeating part (terrace.program.segments).
    """

    model: "ShardedModel"
    stage: Stage
    instructions: Sequence[Instruction] = ()
    phase: Phase = Phase.TRAIN
    exchange: Exchange = NO_EXCHANGE  # between islands, at the end of the step

    @property
    def cluster(self) -> Cluster:
        return self.model.cluster

    @property
    def plan(self) -> Plan:
        return self.model.plan

    @property
    def mesh(self) -> Mesh:
        return self.model.mesh

    @property
    def layout(self) -> Layout:
        return self.model.layout

    @property
    def blocks(self) -> tuple[BlockSpec, ...]:
        return self.model.blocks

    @property
    def trains(self) -> bool:
        return self.phase is Phase.TRAIN

    @property
    def num_micros(self) -> int:
        return self.stage.num_micros

    @cached_property
    def has_secondary(self) -> bool:
        """Whether some block keeps a secondary copy of its parameters."""
        return any(flat.layout.has_secondary for block in self.stage.held for flat in self.model.flats[block])

    def peer(self, rank: int, instruction: Instruction) -> int:
        return self.mesh.at_stage(rank, instruction.peer)

    @cached_property
    def segments(self) -> Segments:
        """The instructions as `Segments`."""
        return Segments.of(self.instructions)

    @cached_property
    def short(self) -> "Program":
        """The program with `SHORT` repetitions, which represent all; itself if nothing repeats."""
        return self.repeating(SHORT) if self.segments.repeats else self

    def repeating(self, count: int) -> "Program":
        """The program with `count` repetitions. Only for a program whose instructions repeat."""
        return replace(self, stage=self.stage.repeating(count), instructions=self.segments.listed(count))

    def whole(self) -> "Program":
        """The program with every repetition written out."""
        if not self.segments.repeats:
            return self
        stage = replace(self.stage, groups=tuple(self.stage.groups))
        return replace(self, stage=stage, instructions=self.segments.listed())

    @property
    def counts(self) -> dict[Instruction, int]:
        """How often each distinct instruction (`Segments.folded`) runs."""
        return self.segments.counts

    def message(self, instruction: Instruction) -> Message:
        """Message of a communicating instruction; found once for instructions that differ only in micro-batch."""
        key = without_micro(instruction)
        found = self._messages.get(key)
        if found is None:
            found = self._messages[key] = self._resolved(instruction)
        return found

    def _resolved(self, instruction: Instruction) -> Message:
        """The message of an instruction, from the model's layouts and the stage (terrace.program.resolve)."""
        model, stage = self.model, self.stage
        message_class, block = instruction.message_class, instruction.block
        assert message_class is not None, f"{instruction} sends nothing"
        if instruction.op is Op.TIE:
            tier = model.mesh.edge_tier(stage.index, instruction.peer)
            return stage_message(message_class, tier, tie_bytes(model.flats[block], model.plan.sums))
        if instruction.peer >= 0:
            received, backward = instruction.op is Op.RECV, instruction.backward
            return model.message_of_edge(stage.index, instruction.peer, block, backward=backward, received=received)
        # Control numbers are summed over all stages, not over the ranks of a block.
        if message_class is MessageClass.CONTROL:
            # A training step stays inside an island; an evaluation spans all islands.
            inside, numbers = self.phase is Phase.TRAIN, AGREED if instruction.op is Op.AGREE else 0
            return control_message(
                model.stage_layout, model.world_layout, model.plan, model.blocks, inside=inside, numbers=numbers
            )
        if instruction.op is Op.OUTER_COUNT:
            return outer_numbers_message(model.world_layout, model.plan, model.blocks, self.exchange)
        if message_class is MessageClass.COUNTS:
            return counts_message(model.stage_layout, model.plan, [model.blocks[index] for index in stage.own])
        return model.message_of_block(
            message_class, block, secondary=instruction.secondary, in_gaps=instruction.in_gaps
        )

    @cached_property
    def _messages(self) -> dict[Unnumbered, Message]:
        return {}

    def edge_hop(self, instruction: Instruction) -> Hop:
        """The hop of a SEND or RECV, over the outermost tier between the two stages."""
        return self.model.edge_hop(self.stage.index, instruction.peer, instruction.block, backward=instruction.backward)

    def messages_inside(self, instruction: Instruction) -> tuple[Message, ...]:
        """The messages that a pass sends inside its block, or a RECV to complete its activation."""
        return self.model.messages_inside(instruction.op, instruction.block, backward=instruction.backward)

    @property
    def messages(self) -> list[Message]:
        """The messages of all distinct instructions, including those inside blocks."""
        communicating = (each for each in self.counts if each.message_class is not None)
        return [
            *(self.message(each) for each in communicating),
            *(message for each in self.counts for message in self.messages_inside(each)),
        ]

    @cached_property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Bytes that each rank sends per step, by message class and tier, without those that depend on the batch."""
        return declared_ahead(self.expected_bytes)

    @cached_property
    def expected_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """`sent_bytes` plus the expected bytes of routed messages under uniform routing."""
        # Many instructions share a message, so their number is counted before its bytes.
        found: dict[int, tuple[Message, int]] = {}
        for instruction, times in self.counts.items():
            # A pass sends the messages inside its block; a RECV may gather the rest of its activation.
            own = () if SPECS[instruction.op].message is None else (self.message(instruction),)
            for message in (*own, *self.messages_inside(instruction)):
                known = found.get(id(message))
                found[id(message)] = (message, times if known is None else known[1] + times)
        total, tiers = defaultdict[tuple[MessageClass, str], int](int), self.layout.tiers
        for message, times in found.values():
            for tier, num_bytes in message.sends:
                total[message.message_class, tiers[tier]] += times * num_bytes
        return {**total, **kept_bytes(self.model, self.counts)}

    @cached_property
    def num_kept_pieces(self) -> int:
        """Pieces of states below the device that pass in a step (terrace.plan.kept)."""
        return num_pieces(self.model, self.counts)

    def rows_below(self, block: int) -> RowBytes:
        """Mean bytes of rows below the device that a block's look-ups and its update move; `NO_ROWS` without any."""
        return rows_of(self.model, self.counts, block) if self.plan.keep.table_below else NO_ROWS

    @cached_property
    def most_inputs_below(self) -> int:
        # A peak does not grow with repetitions.
        return most_below(self.short.instructions) if self.model.leaving else 0

    @cached_property
    def resting_bytes(self) -> dict[str, int]:
        """Bytes that a rank keeps on each medium below its device."""
        return resting_bytes(self.model, self.stage.held, self.most_inputs_below)

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        return state_buffers(self.model, self.stage, self.instructions, self.messages)

    @cached_property
    def state_bytes(self) -> dict[str, int]:
        # A peak does not grow with repetitions.
        return peak_bytes(self.short.buffers)

    def report(
        self, time_s: Mapping[str, float], sent_bytes: Mapping[tuple[MessageClass, str], int] | None = None
    ) -> StepReport:
        """The report of a step with `time_s` seconds by category; `sent_bytes` defaults to the program's."""
        sent_bytes = self.sent_bytes if sent_bytes is None else sent_bytes
        return StepReport(time_s=dict(time_s), sent_bytes=sent_bytes, memory_bytes=self.state_bytes)
