"""The Program: the instructions of one rank with what they refer to."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from terrace.cluster import Cluster
from terrace.model.spec import BlockSpec
from terrace.plan import Layout, MessageClass, Plan
from terrace.plan.hops import block_hops, coding_bytes, control_numbers, lossy_messages
from terrace.plan.wire import CONTROL_NUMBER_BYTES
from terrace.program.instruction import Instruction, Op

_MESSAGES = {
    Op.GATHER: MessageClass.GATHER,
    Op.REDUCE: MessageClass.REDUCE,
    Op.SYNC: MessageClass.SYNC,
    Op.CLIP: MessageClass.CONTROL,
    Op.REFRESH: MessageClass.REFRESH,
}


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
        if instruction.backward:
            return MessageClass.GATHER_BACKWARD
        return _MESSAGES[instruction.op]

    def crossed(self, instruction: Instruction) -> tuple[int, ...]:
        """Return the indexes of the tiers on which a collective instruction has someone to talk to."""
        layout = self.layout
        tiers = layout.route(self.message(instruction))
        if instruction.op is Op.GATHER and instruction.secondary:
            tiers = range(layout.params_backward + 1)
        return tuple(tier for tier in tiers if layout.degrees[tier] > 1)

    def lane(self, instruction: Instruction) -> int:
        """Return the lane of a collective instruction: the outermost tier it crosses, 0 if it is local.

        What stays on fast inner tiers so never waits behind a message on a slow outer one.
        """
        return max(self.crossed(instruction), default=0)

    def sends(self, instruction: Instruction) -> Iterator[tuple[int, int]]:
        """Yield (tier index, bytes) for every collective that an instruction makes this rank take part in."""
        layout, message = self.layout, self.message(instruction)
        if message is MessageClass.CONTROL:
            message_bytes = control_numbers(layout, self.plan) * CONTROL_NUMBER_BYTES
            yield from ((tier, (layout.degrees[tier] - 1) * message_bytes) for tier in self.crossed(instruction))
            return
        source = layout.params_backward if instruction.secondary else None
        for numel in self._carried(instruction):
            hops = block_hops(layout, self.plan, message, numel, source)
            yield from ((hop.tier, hop.sent_bytes) for hop in chain(*hops))

    def coding_bytes(self, instruction: Instruction) -> float:
        """Return the bytes of memory that coding and decoding the messages of a collective moves on this rank."""
        message = self.message(instruction)
        if message is MessageClass.CONTROL or not self._codes:
            return 0.0
        source = self.layout.params_backward if instruction.secondary else None
        carried = self._carried(instruction)
        return sum(coding_bytes(self.layout, self.plan, message, numel, source) for numel in carried)

    @cached_property
    def _codes(self) -> bool:
        return bool(lossy_messages(self.layout, self.plan))

    def _carried(self, instruction: Instruction) -> list[int]:
        """Return the padded elements of each flat buffer that a collective of a block carries."""
        block = self.blocks[instruction.block]
        numels = (block.num_trainable, *([block.num_frozen] if instruction.op is Op.GATHER else []))
        return [self.layout.padded(numel) for numel in numels]
