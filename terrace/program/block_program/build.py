"""The program of a block: the steps of its axes, joined."""

from collections.abc import Sequence

from terrace.model.spec import BlockSpec
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.tensor_traffic import TensorTraffic, choice_messages
from terrace.program.block_program.attention import attention_steps
from terrace.program.block_program.regions import tensor_steps
from terrace.program.block_program.routed import routed_steps
from terrace.program.block_program.steps import Await, BlockProgram, Send, Steps


def block_program(
    tensor: TensorTraffic, context: ContextTraffic, blocks: Sequence[BlockSpec], index: int, *, recomputed: bool
) -> BlockProgram:
    """The program of block `index` of `blocks`, as a tensor rank holds them, on one micro-batch.

    With `balance = "cost"` the messages of attention depend on the batch, and are not in it.
    Raises `PlanError` where there are messages and sequences have no length.
    """
    block = blocks[index]
    forward, backward = attention = attention_of(context, block)
    there, back = routed_steps(tensor, block)
    # No gradient leaves the first block: one in which nothing is trained has no backward.
    back = back if index or block.num_trainable else ()
    shared: tuple[Steps, Steps] = (), ()
    # Attention's steps stand inside the tensor axis' steps.
    if tensor.degree > 1:
        (forward, backward), shared = tensor_steps(tensor, blocks, block, attention, recomputed)
    told = choice_messages(tensor, block)
    if told:
        forward = (*forward, Send(told), Await(Send(told)))
    return BlockProgram(forward, backward, recomputed, (there, back), shared)


def attention_of(context: ContextTraffic, block: BlockSpec) -> tuple[Steps, Steps]:
    """Steps of a block's attention, forward and backward; none where it has none or they depend on the batch."""
    bytes_of = context.attention(block)
    return ((), ()) if bytes_of is None else attention_steps(bytes_of.parts, bytes_of.ring)
