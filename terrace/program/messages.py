"""The message of an instruction, from the model's layouts and the stage that issues it (terrace.program.resolve)."""

from typing import TYPE_CHECKING

from terrace.plan.hops import Hop
from terrace.plan.outer import Exchange
from terrace.plan.stage import Stage
from terrace.plan.state_bytes import tie_bytes
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.message import Message
from terrace.program.phase import Phase
from terrace.program.resolve import AGREED, control_message, counts_message, outer_numbers_message, stage_message

if TYPE_CHECKING:
    from terrace.program.sharded_model import ShardedModel


def message_of(
    model: "ShardedModel", stage: Stage, phase: Phase, exchange: Exchange, instruction: Instruction
) -> Message:
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
        inside, numbers = phase is Phase.TRAIN, AGREED if instruction.op is Op.AGREE else 0
        return control_message(
            model.stage_layout, model.world_layout, model.plan, model.blocks, inside=inside, numbers=numbers
        )
    if instruction.op is Op.OUTER_COUNT:
        return outer_numbers_message(model.world_layout, model.plan, model.blocks, exchange)
    if message_class is MessageClass.COUNTS:
        return counts_message(model.stage_layout, model.plan, [model.blocks[index] for index in stage.own])
    return model.message_of_block(message_class, block, secondary=instruction.secondary, in_gaps=instruction.in_gaps)


def edge_hop(model: "ShardedModel", stage: Stage, instruction: Instruction) -> Hop:
    """The hop of a SEND or RECV, over the outermost tier between the two stages."""
    return model.edge_hop(stage.index, instruction.peer, instruction.block, backward=instruction.backward)
