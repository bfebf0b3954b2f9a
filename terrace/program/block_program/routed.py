"""Steps of a mixture whose experts are on several ranks (bytes: terrace.plan.expert_traffic).

Tokens are sent in chunks, each over one tier after another. With f chunks in a forward and b in a backward, tokens are
cut into max(f, b) pieces, and a chunk is one or more pieces:

    forward    gather the table of counts, and wait for it
               send rows of all chunks over the first tier, of some chunks over the next tiers
               the shared expert
               for every chunk: await its rows; send the next chunk, over each tier; experts on its pieces; send
               results back
               await all results
    backward   send gradients of results in the same way; gradients of the shared expert
               for every chunk: await them; send the next chunk; gradients of rows; send gradients of tokens back;
               gradients of weights, overlapped with messages
               await all gradients of tokens

Every tier sends its messages in the order of issue. Results on the first tier are needed only at the end of the pass,
so all chunks are sent over it before the first result returns. On the other tiers, results of early chunks would queue
behind rows that have not arrived yet. So while a chunk is computed, `ahead` chunks have been sent over the innermost
tier, and one more over each tier outside it. With `ahead` one less than the number of chunks, all rows are sent before
the first results, as in FSMoE (2501.10714). Which is faster depends on the links (terrace.simulate.chunks).

If the plan has `expert_gaps`, a backward has gaps in which parts of earlier gradients are sent: after the messages
issued before a chunk's matmuls, and after the last combine (terrace.plan.gaps). The link would otherwise idle there.

In a split backward, gradients of weights are in the weight half. A recomputed forward reuses the table. Attention comes
before these steps in a forward, and after them in a backward. Each message uses the lane of its tier
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
    return expert_steps(ExpertTraffic.of(tensor, block))


def expert_steps(traffic: ExpertTraffic) -> tuple[Steps, Steps]:
    """(Forward steps, backward steps) of a layer's experts; empty if no tokens leave a rank."""
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
    """`ahead`, limited to what a pass with `number` chunks allows."""
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
    """For each hop, how many rounds before its compute a chunk is sent over it; a round computes one chunk."""
    tiers, ahead = [tier for tier, _ in traffic.way], most_ahead(traffic.ahead, number)
    rounds = [min(number, ahead + hop) for hop in reversed(range(len(tiers)))]
    if tiers and tiers[0] not in tiers[1:]:
        rounds[0] = number
    return rounds
