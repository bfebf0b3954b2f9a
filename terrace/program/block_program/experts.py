"""Steps of a mixture whose experts are on several ranks (bytes: terrace.plan.expert_traffic).

    forward    gather the table of counts; rows to the experts, tier by tier; products; results back, tier by tier
    backward   gradients of results to the experts; products; gradients of tokens back

Every message is waited for. Attention comes before them in a forward, and after them in a backward.
"""

from collections.abc import Iterable, Iterator

from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Send, Steps


def expert_steps(traffic: ExpertTraffic) -> tuple[Steps, Steps]:
    """Steps of a forward and of a backward of a layer's experts."""
    tables = []
    for line, copies in ((traffic.rows, True), (traffic.expert, False)):
        tiers = [tier for tier, degree in enumerate(line) if degree > 1]
        if tiers:
            tables.append(ExpertMessage(MessageClass.ROUTE, max(tiers), copies))
    return (*_awaited(tables), *_there_and_back(traffic, False)), tuple(_there_and_back(traffic, True))


def _there_and_back(traffic: ExpertTraffic, backward: bool) -> Iterator[BlockStep]:
    yield from _awaited(ExpertMessage(MessageClass.DISPATCH, *hop, backward) for hop in traffic.way)
    yield Compute(ComputeKind.EXPERT_GRADIENTS if backward else ComputeKind.EXPERTS)
    yield from _awaited(ExpertMessage(MessageClass.COMBINE, *hop, backward) for hop in reversed(traffic.way))


def _awaited(messages: Iterable[ExpertMessage]) -> Iterator[BlockStep]:
    for message in messages:
        send = Send((message,))
        yield send
        yield Await(send)
