"""The Program: the instructions of one rank, and the values they refer to."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from terrace.base.alike import first_equal
from terrace.base.repeated import Repeated
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.edges import Edge, edge_of
from terrace.plan.flats import FlatParamSpec, block_flats, stage_layout, world_layout
from terrace.plan.hops import Hop
from terrace.plan.in_block_messages import RoutedMessage, TensorMessage
from terrace.plan.kinds import Kinds
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.outer import NO_EXCHANGE, Exchange
from terrace.plan.plan import Plan
from terrace.plan.recompute import WHOLE, recomputed_parts
from terrace.plan.stage import SHORT, Stage
from terrace.plan.state_bytes import tie_bytes
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import BETWEEN_STAGES, MessageClass
from terrace.program.block_program.build import block_program
from terrace.program.block_program.steps import BlockProgram, InBlockMessage, messages_of
from terrace.program.buffers import Buffer, peak_bytes, state_buffers
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.message import Message
from terrace.program.phase import Phase
from terrace.program.report import StepReport, declared_ahead
from terrace.program.resolve import (
    block_message,
    context_message,
    control_message,
    counts_message,
    edge_message,
    message_in_gaps,
    outer_numbers_message,
    stage_message,
    tensor_message,
)
from terrace.program.routed import Routed
from terrace.program.segments import Folded, Segments, Unnumbered, without_micro

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Program:
    """The instructions of a rank for one step. All ranks of a stage share one Program object.

    `blocks` is the whole model, as one tensor rank holds it; `stage` selects those that this program runs. A long step
    is stored with its repeating body (terrace.base.repeated).
    """

    cluster: Cluster
    plan: Plan
    layout: Layout
    blocks: tuple[BlockSpec, ...]
    stage: Stage
    instructions: Sequence[Instruction]
    sequence: int = 0  # length in tokens, which determines the messages of tensor, context and pipeline axes
    phase: Phase = Phase.TRAIN
    exchange: Exchange = NO_EXCHANGE  # between islands, at the end of the step

    @property
    def trains(self) -> bool:
        """Whether this is a training step."""
        return self.phase is Phase.TRAIN

    @property
    def num_micros(self) -> int:
        """Micro-batches per step."""
        return self.stage.num_micros

    @cached_property
    def stage_layout(self) -> Layout:
        """The layout of all ranks that together hold a block; equals `layout` without a tensor axis."""
        return self.layout if self.mesh.total("tensor") == 1 else stage_layout(self.cluster, self.plan)

    @cached_property
    def world_layout(self) -> Layout:
        """The layout of all ranks of all stages."""
        return self.stage_layout if self.mesh.total("pipeline") == 1 else world_layout(self.cluster, self.plan)

    @cached_property
    def mesh(self) -> Mesh:
        """The plan's mesh."""
        return Mesh.of(self.cluster, self.plan)

    @cached_property
    def edge(self) -> Edge:
        """The activation that crosses each edge between stages. Only with a pipeline."""
        return edge_of(self.tensor, self.blocks)

    @cached_property
    def flats(self) -> tuple[tuple[FlatParamSpec, ...], ...]:
        """The flat buffers of every block."""
        return block_flats(self.cluster, self.plan, self.blocks, (self.layout, self.stage_layout))

    @cached_property
    def alike(self) -> list[int]:
        """For each block, the first block with equal flat buffers, and so equal messages and update."""
        return first_equal(self.flats)

    def of_flats(self, function: Callable[[Sequence[FlatParamSpec]], T]) -> list[T]:
        """`function` of every block's flat buffers, called once for equal blocks (`alike`)."""
        found = {first: function(self.flats[first]) for first in dict.fromkeys(self.alike)}
        return [found[first] for first in self.alike]

    @cached_property
    def tensor(self) -> TensorTraffic:
        """The tensor axis."""
        return TensorTraffic.of(self.mesh, self.layout.tiers, self.plan, self.sequence)

    @cached_property
    def routed(self) -> Routed:
        """The messages that carry tokens to experts and back."""
        return Routed(self.cluster, self.mesh, self.tensor, self.blocks)

    @cached_property
    def has_secondary(self) -> bool:
        """Whether some block keeps a secondary copy of its parameters."""
        return any(flat.layout.has_secondary for block in self.stage.held for flat in self.flats[block])

    def gathers(self, block: int) -> bool:
        """Whether some parameters of a block are sharded and must be gathered."""
        return any(flat.layout.gathers for flat in self.flats[block])

    def frees(self, block: int) -> bool:
        """Whether some gathered parameters of a block are freed, to be gathered again."""
        return any(flat.layout.frees for flat in self.flats[block])

    def peer(self, rank: int, instruction: Instruction) -> int:
        """The peer rank of `rank` for a SEND, RECV or TIE."""
        return self.mesh.at_stage(rank, instruction.peer)

    def of_stage(self, stage: Stage, instructions: Sequence[Instruction] = (), phase: Phase | None = None) -> "Program":
        """A program with another stage and instructions; the phase is kept unless one is given.

        Cached values that depend only on plan and blocks are shared.
        """
        found = replace(self, stage=stage, instructions=instructions, phase=phase or self.phase)
        shared = (*_OF_THE_PLAN, "edge") if stage.num_stages > 1 else _OF_THE_PLAN
        vars(found).update({name: getattr(self, name) for name in shared})
        return found

    def with_stages(self, stages: tuple[int, ...]) -> "Program":
        """The program with `plan.stages` set; everything else is shared."""
        return self._sharing(replace(self, plan=replace(self.plan, stages=stages)))

    def with_exchange(self, exchange: Exchange) -> "Program":
        """The program with another `exchange`; the caller replaces the instructions. Everything else is shared."""
        return self._sharing(replace(self, exchange=exchange))

    def _sharing(self, found: "Program") -> "Program":
        vars(found).update({name: getattr(self, name) for name in _OF_THE_PLAN})
        return found

    def on(self, cluster: Cluster) -> "Program":
        """The program on a cluster with the same tier sizes but other constants; everything else is shared."""
        found = replace(self, cluster=cluster)
        vars(found).update({name: value for name, value in vars(self).items() if name != "cluster"})
        return found

    @cached_property
    def segments(self) -> Segments:
        """The instructions as `Segments`."""
        return Segments.of(self.instructions)

    @property
    def folded(self) -> Folded:
        """The distinct instructions, and their order."""
        return self.segments.folded

    @cached_property
    def short(self) -> "Program":
        """The program with `SHORT` repetitions, which represent all; itself if nothing repeats."""
        if not isinstance(self.instructions, Repeated):
            return self
        return self.repeating(SHORT)

    def repeating(self, count: int) -> "Program":
        """The program with `count` repetitions. Only for a program whose instructions repeat."""
        assert isinstance(self.instructions, Repeated), "a short program is kept whole"
        return self.of_stage(self.stage.repeating(count), tuple(self.instructions.times(count)))

    def whole(self) -> "Program":
        """The program with every repetition written out."""
        if not isinstance(self.instructions, Repeated):
            return self
        return self.of_stage(replace(self.stage, groups=tuple(self.stage.groups)), tuple(self.instructions))

    @cached_property
    def counts(self) -> dict[Instruction, int]:
        """How often each distinct instruction (`folded`) runs."""
        if isinstance(self.instructions, Repeated):
            body = Counter(map(without_micro, self.instructions.body))
            further = self.instructions.repeats - SHORT
            return {each: runs + further * body[without_micro(each)] for each, runs in self.short.counts.items()}
        return self.folded.counts()

    def message(self, instruction: Instruction) -> Message:
        """Message of a communicating instruction; cached for instructions that differ only in micro-batch."""
        key = without_micro(instruction)
        if key not in self._messages:
            self._messages[key] = self._resolved(instruction)
        return self._messages[key]

    @cached_property
    def sent_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """Bytes that each rank sends per step, by message class and tier, without those that depend on the batch."""
        return declared_ahead(self.expected_bytes)

    @cached_property
    def expected_bytes(self) -> dict[tuple[MessageClass, str], int]:
        """`sent_bytes` plus the expected bytes of routed messages under uniform routing."""
        total: dict[tuple[MessageClass, str], int] = defaultdict(int)
        for instruction, times in self.counts.items():
            # A pass sends the messages inside its block; a RECV may gather the rest of its activation.
            own = () if instruction.message_class is None else (self.message(instruction),)
            for message in (*own, *self.messages_inside(instruction)):
                for tier, num_bytes in message.sends:
                    total[message.message_class, self.layout.tiers[tier]] += times * num_bytes
        return dict(total)

    @cached_property
    def _messages(self) -> dict[Unnumbered, Message]:
        return {}

    @cached_property
    def _of_blocks(self) -> dict[tuple[MessageClass, int | None, int, bool], Message]:
        return {}

    def _resolved(self, instruction: Instruction) -> Message:
        message_class = instruction.message_class
        assert message_class is not None, f"{instruction} sends nothing"
        # Point to point: the tier follows from the two stages' positions.
        if instruction.peer >= 0:
            if instruction.op is Op.TIE:
                tier = self.mesh.edge_tier(self.stage.index, instruction.peer)
                return stage_message(message_class, tier, tie_bytes(self.flats[instruction.block], self.plan.sums))
            hop, received = self.edge_hop(instruction), instruction.op is Op.RECV
            return edge_message(message_class, hop, self.plan.compute, received=received)
        # Control numbers are summed over all stages, not over the ranks of a block.
        if message_class is MessageClass.CONTROL:
            # A training step stays inside an island; an evaluation spans all islands.
            inside = self.trains
            return control_message(self.stage_layout, self.world_layout, self.plan, self.blocks, inside=inside)
        if instruction.op is Op.OUTER_COUNT:
            return outer_numbers_message(self.world_layout, self.plan, self.blocks, self.exchange)
        if message_class is MessageClass.COUNTS:
            return counts_message(self.stage_layout, self.plan, [self.blocks[index] for index in self.stage.own])
        # A gather from the secondary copy starts on that copy's inner tier.
        source = self.stage_layout.params_backward if instruction.secondary else None
        flats = self.flats[instruction.block]
        key = (message_class, source, self.alike[instruction.block], instruction.in_gaps)
        found = self._of_blocks.get(key)
        if found is None:
            found = block_message(message_class, self.stage_layout, self.plan, flats, source)
            found = self._of_blocks[key] = message_in_gaps(found, self.plan, flats) if instruction.in_gaps else found
        return found

    @property
    def messages(self) -> list[Message]:
        """The messages of all distinct instructions, including those inside blocks."""
        communicating = (each for each in self.counts if each.message_class is not None)
        return [
            *(self.message(each) for each in communicating),
            *(message for each in self.counts for message in self.messages_inside(each)),
        ]

    @cached_property
    def buffers(self) -> tuple[Buffer, ...]:
        """Model-state buffers on a rank."""
        return state_buffers(self.plan, self.stage, self.blocks, self.flats, self.instructions, self.messages)

    @cached_property
    def state_bytes(self) -> dict[str, int]:
        """Peak bytes of model state on a rank, by category."""
        # A peak does not grow with repetitions.
        return peak_bytes(self.short.buffers)

    def report(
        self, time_s: Mapping[str, float], sent_bytes: Mapping[tuple[MessageClass, str], int] | None = None
    ) -> StepReport:
        """The report of a step with `time_s` seconds by category; `sent_bytes` defaults to the program's."""
        sent_bytes = self.sent_bytes if sent_bytes is None else sent_bytes
        return StepReport(time_s=dict(time_s), sent_bytes=sent_bytes, memory_bytes=self.state_bytes)

    def edge_hop(self, instruction: Instruction) -> Hop:
        """The hop of a SEND or RECV, over the outermost tier between the two stages."""
        tier = self.mesh.edge_tier(self.stage.index, instruction.peer)
        wire = self.plan.wire_format(BETWEEN_STAGES[instruction.backward], self.layout.tiers[tier])
        return Hop(tier, 2, wire, self.edge.numel)

    def block_program(self, block: int) -> BlockProgram:
        """The program of a block on one micro-batch: compute and messages in the order of issue."""
        key = self.alike_inside(block)
        if key not in self._block_programs:
            found = block_program(self.tensor, self.context, self.blocks, block, recomputed=self.recomputes(block))
            self._block_programs[key] = found
        return self._block_programs[key]

    def alike_inside(self, block: int) -> tuple[int, tuple[str, ...]]:
        """(Kind, recomputed part) of a block; blocks with equal keys share one block program."""
        # A frozen first block has no backward, so it is a separate kind.
        return self.kinds[block] if block or self.blocks[0].num_trainable else -1, self.recomputed[block]

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Kind of each block; blocks of one kind differ only in their names."""
        return Kinds.of(self.blocks).order

    def messages_inside(self, instruction: Instruction) -> tuple[Message, ...]:
        """The messages that a pass sends inside its block, or a RECV to complete its activation; cached."""
        op, block = instruction.op, instruction.block
        if op is not Op.RECV and op not in PASSES:
            return ()
        # All received activations have the same shape.
        key = (op, None if op is Op.RECV else self.alike_inside(block))
        found = self._inside.get(key)
        if found is None:
            messages: Iterable[InBlockMessage]
            if op is Op.RECV:
                messages = () if self.edge.gathers is None else (self.edge.gathers,)
            else:
                messages = messages_of(self.block_program(block).steps(op))
            found = self._inside[key] = tuple(self.message_inside(message, block) for message in messages)
        return found

    def message_inside(self, message: InBlockMessage, block: int) -> Message:
        """Resolve one message inside a block."""
        if isinstance(message, TensorMessage):
            found = self._of_lines.get(message)
            if found is None:
                found = self._of_lines[message] = tensor_message(self.tensor, message)
            return found
        if isinstance(message, RoutedMessage):
            return self.routed.message(message, block)
        attention = self.context.attention(self.blocks[block])
        assert attention is not None, f"block {block} sends {message}"
        return context_message(attention.sends(message))

    @cached_property
    def context(self) -> ContextTraffic:
        """The context axis."""
        return ContextTraffic(self.plan, self.mesh, self.sequence, self.layout.tiers)

    @cached_property
    def _block_programs(self) -> dict[tuple[int, tuple[str, ...]], BlockProgram]:
        return {}

    @cached_property
    def _inside(self) -> dict[tuple[Op, tuple[int, tuple[str, ...]] | None], tuple[Message, ...]]:
        return {}

    @cached_property
    def _of_lines(self) -> dict[TensorMessage, Message]:
        return {}

    def recomputes(self, block: int) -> bool:
        """Whether the backward of a block recomputes its whole forward."""
        return self.recomputed[block] == WHOLE

    @cached_property
    def recomputed(self) -> tuple[tuple[str, ...], ...]:
        """What each block's backward recomputes (`terrace.plan.recompute.recomputed_parts`)."""
        return recomputed_parts(self.plan.recompute, self.blocks)


# Values derived from plan, cluster and blocks alone, which the programs of all stages share.
_OF_THE_PLAN = (
    *("stage_layout", "world_layout", "mesh", "flats", "alike", "tensor", "context", "routed"),
    *("_of_blocks", "_of_lines", "_inside", "_block_programs", "kinds", "recomputed"),
)
