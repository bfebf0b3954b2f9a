"""Steps of a mixture whose experts are on several ranks (bytes: terrace.plan.expert_traffic).

Tokens travel in chunks, each over the tiers on its way one after the other. With f chunks in a forward and b in a
backward, of pieces of tokens 1 .. max(f, b), of which a chunk has one or several:

    forward    gather the table of counts, and wait for it
               send rows of chunk 1 to the experts, and rows of later chunks over the outer tiers
               the shared expert
               for every chunk: await its rows; send the next, over each tier; products of its pieces; results back
               await all results
    backward   send gradients of results in the same way; gradients of the shared expert
               for every chunk: await them; send the next; products that give gradients of rows; gradients of tokens
               back; products that give gradients of weights, while messages travel
               await all gradients of tokens

With m tiers on the way, chunk c + 1 is on the innermost while chunk c is multiplied, and chunk c + m on the outermost.
A backward has gaps for parts of the gradients before it, where the plan names them: once the messages before the
products of a chunk are under way, and after the last combine (terrace.plan.gaps). The link would idle there.

Half a backward leaves the gradients of weights to the other half. A recomputed forward has kept the table. Attention
comes before the steps of a forward, and after the steps of a backward. Each message takes the lane of its tier
(terrace.program.resolve).
"""

from collections.abc import Iterator

from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Gap, Send, Steps


def expert_steps(traffic: ExpertTraffic) -> tuple[Steps, Steps]:
    """Steps of a forward and of a backward of a layer's experts."""
    tables: list[BlockStep] = []
    for line, copies in ((traffic.rows, True), (traffic.expert, False)):
        tiers = [tier for tier, degree in enumerate(line) if degree > 1]
        if tiers:
            table = Send((ExpertMessage(MessageClass.ROUTE, max(tiers), copies),))
            tables += [table, Await(table)]
    return (*tables, *_chunks(traffic, backward=False)), tuple(_chunks(traffic, backward=True))


def _chunks(traffic: ExpertTraffic, *, backward: bool) -> Iterator[BlockStep]:
    number, num_hops = traffic.chunks[backward], len(traffic.way)
    each, has_gaps = traffic.pieces // number, backward and traffic.has_gaps
    kind = ComputeKind.EXPERT_GRADIENTS if backward else ComputeKind.EXPERTS
    there, back = [], []
    for chunk in range(number):
        there.append([Send((ExpertMessage(MessageClass.DISPATCH, *hop, backward, chunk),)) for hop in traffic.way])
        combine = (ExpertMessage(MessageClass.COMBINE, *hop, backward, chunk) for hop in reversed(traffic.way))
        back.append([Send((message,)) for message in combine])

    def due(done: int) -> Iterator[BlockStep]:
        # A hop goes out a round behind the hop before: else it would wait on its lane, before what is ready to go back.
        for hop in range(num_hops):
            chunk = done + num_hops - hop
            if 0 <= chunk < number:
                yield there[chunk][hop]

    for round_ in range(-num_hops, 0):
        yield from due(round_)
    if traffic.shares:
        yield Compute(ComputeKind.SHARED_GRADIENTS if backward else ComputeKind.SHARED)
    for chunk in range(number):
        yield from map(Await, there[chunk])
        yield from due(chunk)
        if has_gaps:
            yield Gap(1 + chunk)
        for piece in range(each * chunk, each * (chunk + 1)):
            yield Compute(kind, piece)
        yield from back[chunk]
        if has_gaps and chunk == number - 1:
            yield Gap(1 + number)
        if backward:
            yield Compute(ComputeKind.EXPERT_WEIGHTS, chunk)
    for sent in back:
        yield from map(Await, sent)
