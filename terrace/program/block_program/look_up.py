"""Steps of a look-up in a table whose rows are on several ranks (bytes: terrace.plan.tables).

    forward    for every tier, from the innermost outward: gather counts, and wait; dispatch ids toward the owners of
               their rows, and wait
               for every tier, from the outermost inward: combine the vectors, and wait
    backward   for every tier, from the innermost outward: dispatch gradients of rows, and wait

Each step needs the result of the step before, so no message of a look-up is hidden by its own work. Look-ups are in the
first block of a model, whose backward is the last of a micro-batch and runs beside gradient messages of other blocks. A
frozen table has no backward.
"""

from collections.abc import Iterator

from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.tables import TableTraffic
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Send, Steps


def look_up_steps(traffic: TableTraffic) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a look-up; empty if no ids leave a rank."""
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
