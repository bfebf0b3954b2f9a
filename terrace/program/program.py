"""The Program: the instructions of one rank with what they refer to."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.edges import Edge, edge_of, tie_bytes
from terrace.plan.flats import FlatSpec, block_flats, everyone, world
from terrace.plan.hops import block_hops, coding_bytes, control_numbers, lossy_messages
from terrace.plan.layout import message_lane, message_tiers
from terrace.plan.memory import model_state_bytes
from terrace.plan.mesh import Mesh
from terrace.plan.residency import recomputed
from terrace.plan.stage import Stage
from terrace.plan.tensor_traffic import Tensor, TensorMessage
from terrace.plan.wire import CONTROL_NUMBER_BYTES, FORMATS
from terrace.program.block_program import BlockProgram, InBlockMessage, block_program, messages_of
from terrace.program.instruction import Instruction, Op

_MESSAGES = {
    Op.GATHER: MessageClass.GATHER,
    Op.REDUCE: MessageClass.REDUCE,
    Op.SYNC: MessageClass.SYNC,
    Op.CLIP: MessageClass.CONTROL,
    Op.ORTHOGONALISE: MessageClass.ORTHOGONALISE,
    Op.REFRESH: MessageClass.REFRESH,
    Op.SEND: MessageClass.PIPELINE,
    Op.RECV: MessageClass.PIPELINE,
    Op.TIE: MessageClass.TIE,
}


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a rank does in one step. Ranks of one equivalence class, those of a stage, share one Program object.

    `blocks` is the whole model, what one tensor rank holds of it; `stage` says which of them this program runs.
    """

    cluster: Cluster
    plan: Plan
    layout: Layout
    blocks: tuple[BlockSpec, ...]
    stage: Stage
    instructions: tuple[Instruction, ...]
    sequence: int = 0  # tokens of a sequence; only what tensor, context and pipeline ranks send depends on it

    @property
    def num_micros(self) -> int:
        """Micro-batches of a step."""
        return self.stage.num_micros

    @cached_property
    def everyone(self) -> Layout:
        """The layout of all ranks that hold some part of a block together; `layout` where there is no tensor axis."""
        return everyone(self.cluster, self.plan)

    @cached_property
    def world(self) -> Layout:
        """The layout of all ranks, whatever they hold."""
        return world(self.cluster, self.plan)

    @cached_property
    def mesh(self) -> Mesh:
        """The place of every rank on every axis."""
        return Mesh.of(self.cluster, self.plan)

    @cached_property
    def edge(self) -> Edge:
        """What crosses every edge between stages; only where there is a pipeline."""
        return edge_of(self.tensor, self.blocks)

    @cached_property
    def flats(self) -> tuple[tuple[FlatSpec, ...], ...]:
        """The flat buffers of every block."""
        return block_flats(self.cluster, self.plan, self.blocks)

    @cached_property
    def tensor(self) -> Tensor:
        """The tensor axis."""
        return Tensor.of(self.mesh, self.layout.tiers, self.plan, self.sequence)

    @cached_property
    def has_secondary(self) -> bool:
        """Whether some block keeps a secondary copy of its parameters."""
        return any(flat.layout.has_secondary for block in self.stage.held for flat in self.flats[block])

    def peer(self, rank: int, instruction: Instruction) -> int:
        """Return the rank that a SEND, a RECV or a TIE of `rank` is about."""
        return self.mesh.at_stage(rank, instruction.peer)

    def message(self, instruction: Instruction) -> MessageClass:
        """Return the class of the messages that an instruction sends."""
        if instruction.op is Op.GATHER and instruction.backward:
            return MessageClass.GATHER_BACKWARD
        return _MESSAGES[instruction.op]

    def crossed(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the indexes of the tiers on which an instruction has someone to talk to."""
        if instruction.peer >= 0:
            return (self.mesh.edge_tier(self.stage.index, instruction.peer),)
        return message_tiers(self.among(instruction), self.message(instruction), self._source(instruction))

    def among(self, instruction: Instruction) -> Layout:
        """Return the layout of the ranks that a collective instruction is among."""
        return self.world if instruction.op is Op.CLIP else self.everyone

    def lane(self, instruction: Instruction) -> int:
        """Return the lane of a collective instruction (terrace.plan.layout.message_lane)."""
        return message_lane(self.among(instruction), self.message(instruction), self._source(instruction))

    def sends(self, instruction: Instruction) -> Iterator[tuple[int, int]]:
        """Yield (tier index, bytes) for every message of an instruction; what a RECV takes in, others have sent."""
        if instruction.op is Op.SEND:
            yield self.mesh.edge_tier(self.stage.index, instruction.peer), self.edge_bytes
        elif instruction.op is Op.TIE:
            tier = self.mesh.edge_tier(self.stage.index, instruction.peer)
            yield tier, tie_bytes(self.flats[instruction.block], self.plan.master)
        elif instruction.op is not Op.RECV:
            yield from ((tier, num_bytes) for tier, _, num_bytes in self.hops(instruction))

    @cached_property
    def state_bytes(self) -> dict[str, int]:
        """Peak bytes of each category of model state on a rank (terrace.plan.memory)."""
        return model_state_bytes(self.cluster, self.plan, self.blocks, self.num_micros, self.sequence, self.stage)

    @property
    def edge_bytes(self) -> int:
        """Bytes of a message between stages."""
        return self.edge.numel * FORMATS[self.plan.compute].element_bytes

    def hops(self, instruction: Instruction) -> Iterator[tuple[int, int, int]]:
        """Yield (tier index, members, bytes) for every collective that an instruction makes this rank take part in."""
        layout, message = self.among(instruction), self.message(instruction)
        if message is MessageClass.CONTROL:
            message_bytes = control_numbers(self.everyone, self.plan) * CONTROL_NUMBER_BYTES
            for tier in self.crossed(instruction):
                yield tier, layout.degrees[tier], (layout.degrees[tier] - 1) * message_bytes
            return
        for flat in self._carried(instruction):
            hops = block_hops(flat.layout, self.plan, message, flat.padded, self._source(instruction))
            yield from ((hop.tier, hop.degree, hop.sent_bytes) for hop in chain(*hops))

    def coding_bytes(self, instruction: Instruction) -> float:
        """Return the bytes of memory that coding and decoding the messages of a collective moves on this rank."""
        message = self.message(instruction)
        if message is MessageClass.CONTROL or not self._codes:
            return 0.0
        source = self._source(instruction)
        carried = self._carried(instruction)
        return sum(coding_bytes(flat.layout, self.plan, message, flat.padded, source) for flat in carried)

    def block_program(self, block: int) -> BlockProgram:
        """The program of a block on one micro-batch: computing and messages in the order of issue."""
        again = block in self._recomputed
        key = (id(self.blocks[block].params), again)  # layers that are alike share their parameters' specs
        if key not in self._block_programs:
            self._block_programs[key] = block_program(self.tensor, self.context, self.blocks, block, recomputed=again)
        return self._block_programs[key]

    def sends_inside(self, instruction: Instruction) -> Iterator[tuple[MessageClass, int, int]]:
        """Yield (class, tier index, bytes) for every message inside a pass or a RECV."""
        if instruction.op is Op.RECV:
            messages: Iterable[InBlockMessage] = () if self.edge.gathers is None else (self.edge.gathers,)
        else:
            messages = messages_of(self.block_program(instruction.block).steps(instruction.op))
        for message in messages:
            for tier, num_bytes in self.message_sends(message, instruction.block):
                yield message.message_class, tier, num_bytes

    def message_sends(self, message: InBlockMessage, block: int) -> Iterable[tuple[int, int]]:
        """(tier index, bytes that a rank sends) of a message inside a block."""
        if isinstance(message, TensorMessage):
            return self.tensor.sends(message)
        attention = self.context.attention(self.blocks[block])
        assert attention is not None, f"block {block} sends {message}"
        return attention.sends(message)

    @cached_property
    def context(self) -> ContextTraffic:
        """The context axis."""
        return ContextTraffic(self.plan, self.mesh, self.sequence)

    @cached_property
    def _block_programs(self) -> dict[tuple[int, bool], BlockProgram]:
        return {}

    def _source(self, instruction: Instruction) -> int | None:
        return self.layout.params_backward if instruction.secondary else None

    def recomputes(self, block: int) -> bool:
        """Whether the backward of a block runs its forward again."""
        return block in self._recomputed

    @cached_property
    def _recomputed(self) -> frozenset[int]:
        return recomputed(self.plan, self.blocks)

    @cached_property
    def _codes(self) -> bool:
        return bool(lossy_messages(self.everyone, self.plan))

    def _carried(self, instruction: Instruction) -> list[FlatSpec]:
        """Return the flat buffers that a collective of a block carries."""
        flats = self.flats[instruction.block]
        if instruction.op is Op.ORTHOGONALISE:
            return [flat for flat in flats if flat.num_orthogonal]
        return [flat for flat in flats if flat.trainable or instruction.op is Op.GATHER]
