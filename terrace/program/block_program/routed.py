"""Steps of a mixture whose experts are on several ranks (bytes: terrace.plan.expert_traffic).

Tokens travel in chunks, each over the tiers on its way one after the other. With f chunks in a forward and b in a
backward, of pieces of tokens 1 .. max(f, b), of which a chunk has one or several:

    forward    gather the table of counts, and wait for it
               send rows of all chunks over the first tier on the way, of some over the next tiers
               the shared expert
               for every chunk: await its rows; send the next, over each tier; products of its pieces; results back
               await all results
    backward   send gradients of results in the same way; gradients of the shared expert
               for every chunk: await them; send the next; products that give gradients of rows; gradients of tokens
               back; products that give gradients of weights, while messages travel
               await all gradients of tokens

Every tier carries its messages in the order in which they are sent. Nothing waits for results on the first tier but the
end of the pass, so all chunks leave over it before the first comes back. Over the others results of earlier chunks
would wait behind rows that are not there yet: `ahead` chunks are on the innermost, or have arrived, while a chunk is
multiplied, and one more on each tier outside it. With `ahead` one less than the chunks all rows go out before the first
results, as in FSMoE (2501.10714). It depends on the links which is faster (terrace.simulate.chunks).

A backward has gaps for parts of the gradients before it, where the plan names them: once the messages before the
products of a chunk are under way, and after the last combine (terrace.plan.gaps). The link would idle there.

Half a backward leaves the gradients of weights to the other half. A recomputed forward has kept the table. Attention
comes before the steps of a forward, and after the steps of a backward. Each message takes the lane of its tier
(terrace.program.resolve).
"""

from collections.abc import Iterator

from terrace.model.spec import BlockSpec
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.tensor_traffic import TensorTraffic
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import Await, BlockStep, Compute, ComputeKind, Gap, Send, Steps


def routed_steps(tensor: TensorTraffic, block: BlockSpec) -> tuple[Steps, Steps]:
    """`expert_steps` of a block as a tensor rank holds it."""
    return expert_steps(ExpertTraffic.of(tensor, block))


def expert_steps(traffic: ExpertTraffic) -> tuple[Steps, Steps]:
    """Steps of a forward and of a backward of a layer's experts; none where no tokens leave a rank."""
    if not traffic.way:
        return (), ()
    tables: list[BlockStep] = []
    for line, copies in ((traffic.rows, True), (traffic.expert, False)):
        tiers = [tier for tier, degree in enumerate(line) if degree > 1]
        if tiers:
            table = Send((RoutedMessage(MessageClass.ROUTE, max(tiers), copies),))
            tables += [table, Await(table)]
    return (*tables, *_chunks(traffic, backward=False)), tuple(_chunks(traffic, backward=True))


def most_ahead(ahead: int, number: int) -> int:
    """How many of `number` chunks are ahead of another: a pass with fewer chunks than the other has fewer ahead."""
    return max(1, min(ahead, number - 1))


def _chunks(traffic: ExpertTraffic, *, backward: bool) -> Iterator[BlockStep]:
    number = traffic.chunks[backward]
    each, rounds, has_gaps = traffic.pieces // number, _rounds(traffic, number), backward and traffic.has_gaps
    kind = ComputeKind.EXPERT_GRADIENTS if backward else ComputeKind.EXPERTS
    there, back = [], []
    for chunk in range(number):
        there.append([Send((RoutedMessage(MessageClass.DISPATCH, *hop, backward, chunk),)) for hop in traffic.way])
        combine = (RoutedMessage(MessageClass.COMBINE, *hop, backward, chunk) for hop in reversed(traffic.way))
        back.append([Send((message,)) for message in combine])

    def due(round_: int) -> Iterator[BlockStep]:
        for hop, earlier in enumerate(rounds):
            if 0 <= round_ + earlier < number:
                yield there[round_ + earlier][hop]

    for round_ in range(-max(rounds, default=0), 0):
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


def _rounds(traffic: ExpertTraffic, number: int) -> list[int]:
    """By hop, how many rounds before its products a chunk is sent over it; a round is the products of a chunk."""
    tiers, ahead = [tier for tier, _ in traffic.way], most_ahead(traffic.ahead, number)
    rounds = [min(number, ahead + hop) for hop in reversed(range(len(tiers)))]
    if tiers and tiers[0] not in tiers[1:]:
        rounds[0] = number
    return rounds
