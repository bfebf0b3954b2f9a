"""Builds the program of a block from the steps of its axes."""

from collections.abc import Iterator, Sequence

from terrace.model.spec import BlockSpec
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.tables import TableTraffic
from terrace.plan.tensor_traffic import TensorTraffic, choice_messages
from terrace.plan.wire import MessageClass
from terrace.program.block_program.attention import steps_of
from terrace.program.block_program.regions import tensor_steps
from terrace.program.block_program.routed import routed_steps
from terrace.program.block_program.steps import Await, BlockProgram, BlockStep, Send, Steps


def block_program(
    tensor: TensorTraffic, context: ContextTraffic, blocks: Sequence[BlockSpec], index: int, *, recomputed: bool
) -> BlockProgram:
    """The program of block `index` of `blocks` (a tensor rank's slices) on one micro-batch.

    Under `balance = "cost"` attention's messages depend on the batch and are not included. Raises `PlanError` if there
    are messages but the sequence length is unknown.
    """
    block = blocks[index]
    forward, backward = attention = attention_of(context, block)
    # A block has experts, looks up rows in a table, or neither.
    of_experts, of_rows = routed_steps(tensor, block), look_up_steps(TableTraffic.of(tensor, block))
    there, back = ((*one, *other) for one, other in zip(of_experts, of_rows, strict=True))
    # A first block without trainable parameters has no backward.
    back = back if index or block.num_trainable else ()
    shared: tuple[Steps, Steps] = (), ()
    # Attention's steps are placed inside the tensor axis's steps.
    if tensor.degree > 1:
        (forward, backward), shared = tensor_steps(tensor, blocks, block, attention, recomputed)
    told = choice_messages(tensor, block)
    if told:
        forward = (*forward, Send(told), Await(Send(told)))
    return BlockProgram(forward, backward, recomputed, (there, back), shared)


def attention_of(context: ContextTraffic, block: BlockSpec) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a block's attention; empty if there are none or if the batch decides."""
    return steps_of(context.attention(block))


def look_up_steps(traffic: TableTraffic) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a look-up in a table whose rows are on several ranks (terrace.plan.tables).

    forward    for every tier, from the innermost outward: gather counts, and wait; dispatch ids toward the owners of
               their rows, and wait
               for every tier, from the outermost inward: combine the vectors, and wait
    backward   for every tier, from the innermost outward: dispatch gradients of rows, and wait

    Each step needs the result of the step before, so no message of a look-up is hidden by its own work. Both are empty
    if no ids leave a rank. A frozen table has no backward.
    """
    forward = (*_dispatched(traffic, MessageClass.ROUTE, MessageClass.DISPATCH), *_combined(traffic))
    backward = tuple(_dispatched(traffic, MessageClass.DISPATCH, backward=True)) if traffic.trains else ()
    return forward, backward


def _dispatched(traffic: TableTraffic, *classes: MessageClass, backward: bool = False) -> Iterator[BlockStep]:
    for tier in traffic.tiers:
        for message_class in classes:
            send = Send((RoutedMessage(message_class, tier, backward=backward),))
            yield from (send, Await(send))


def _combined(traffic: TableTraffic) -> Iterator[BlockStep]:
    for tier in reversed(traffic.tiers):
        send = Send((RoutedMessage(MessageClass.COMBINE, tier),))
        yield from (send, Await(send))
