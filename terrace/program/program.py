"""The Program: the instructions of one rank with what they refer to."""

from collections.abc import Iterator
from dataclasses import dataclass

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.wire import CONTROL_BYTES
from terrace.program.instruction import Instruction, Op


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a rank does in one step. Ranks of one equivalence class share one Program object."""

    cluster: Cluster
    plan: Plan
    layout: Layout
    blocks: tuple[BlockSpec, ...]
    num_micros: int
    instructions: tuple[Instruction, ...]

    def message(self, instruction: Instruction) -> MessageClass:
        """Return the class of the messages a collective instruction sends."""
        if instruction.op is Op.GATHER:
            return MessageClass.GATHER_BACKWARD if instruction.backward else MessageClass.GATHER
        return MessageClass(instruction.op.value.lower()) if instruction.op is not Op.CLIP else MessageClass.CONTROL

    def crossed(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the indexes of the tiers on which a collective instruction has someone to talk to."""
        layout = self.layout
        tiers = layout.route(self.message(instruction))
        if instruction.op is Op.GATHER and instruction.secondary:
            tiers = range(layout.params_backward + 1)
        return tuple(tier for tier in tiers if layout.degrees[tier] > 1)

    def sends(self, instruction: Instruction) -> Iterator[tuple[int, int]]:
        """Yield (tier index, bytes) for every collective that an instruction makes this rank take part in."""
        layout, message = self.layout, self.message(instruction)
        sizes = [0]  # a control message has no block
        if message is not MessageClass.CONTROL:
            block = self.blocks[instruction.block]
            sizes = [block.num_trainable, *([block.num_frozen] if instruction.op is Op.GATHER else [])]
        for tier in self.crossed(instruction):
            copies, name = layout.degrees[tier] - 1, layout.tiers[tier]
            # Over the tiers outside the optimizer's, replicas all-reduce: a reduce-scatter and a gather.
            rounds = 2 if instruction.op is Op.SYNC and tier > layout.optimizer else 1
            for numel in (layout.padded(size) for size in sizes):
                if message is MessageClass.CONTROL:
                    yield tier, copies * CONTROL_BYTES
                elif numel:
                    piece = self.plan.wire_format(message, name).message_bytes(numel // layout.span(tier))
                    yield from ((tier, copies * piece) for _ in range(rounds))
