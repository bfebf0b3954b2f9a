"""Steps of a mixture whose experts are on several ranks (bytes: terrace.plan.expert_traffic).

Tokens travel in chunks, each over the tiers on its way one after the other. With f chunks in a forward and b in a
backward, of pieces of tokens 1 .. max(f, b), of which a chunk has one or several:

    forward    gather the table of counts                                                       waited for
               rows of chunk 1 to the experts                                                   behind the shared expert
               for every chunk: await its rows; send those of the next; products of its pieces; results back
               await all results
    backward   gradients of results of chunk 1 to the experts                                   behind the shared expert
               for every chunk: await them; send the next chunk's; products that give gradients of rows;
               gradients of tokens back; products that give gradients of weights, while messages travel
               await all gradients of tokens

Half a backward leaves the gradients of weights to the other half. Attention comes before the steps of a forward, and
after the steps of a backward. Each message takes the lane of its tier (terrace.program.resolve).
"""

from collections.abc import Iterator

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
            table = Send((ExpertMessage(MessageClass.ROUTE, max(tiers), copies),))
            tables += [table, Await(table)]
    return (*tables, *_chunks(traffic, backward=False)), tuple(_chunks(traffic, backward=True))


def _chunks(traffic: ExpertTraffic, *, backward: bool) -> Iterator[BlockStep]:
    number = traffic.chunks[backward]
    each = traffic.pieces // number
    kind = ComputeKind.EXPERT_GRADIENTS if backward else ComputeKind.EXPERTS
    there, back = [], []
    for chunk in range(number):
        there.append([Send((ExpertMessage(MessageClass.DISPATCH, *hop, backward, chunk),)) for hop in traffic.way])
        combine = (ExpertMessage(MessageClass.COMBINE, *hop, backward, chunk) for hop in reversed(traffic.way))
        back.append([Send((message,)) for message in combine])
    yield from there[0]
    if traffic.shares:
        yield Compute(ComputeKind.SHARED_GRADIENTS if backward else ComputeKind.SHARED)
    for chunk in range(number):
        yield from map(Await, there[chunk])
        yield from there[chunk + 1] if chunk + 1 < number else ()
        for piece in range(each * chunk, each * (chunk + 1)):
            yield Compute(kind, piece)
        yield from back[chunk]
        if backward:
            yield Compute(ComputeKind.EXPERT_WEIGHTS, chunk)
    for sent in back:
        yield from map(Await, sent)
