"""Passes of blocks whose experts are on several ranks: compute and messages in the order in which they run.

Messages of experts share the lanes of tiers with REDUCE, SYNC and GATHER, so their waits depend on the whole step. Such
a pass is played step by step (`Rank.run_steps`), along the steps of the block's own program
(terrace.program.block_program.routed).

The experts' compute is what a rank does between dispatch and combine: sort rows, multiply, weigh and sum them. Under
even routing a rank multiplies T k w rows, for T tokens of k experts and every expert cut over w rows, with E/e experts
of inner size I/w. Router, gate and attention come before the messages in a forward, after them in a backward.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from terrace.cluster.cluster import Device
from terrace.model.operations import Product
from terrace.model.spec import BlockSpec
from terrace.plan.expert_traffic import NO_TRAFFIC, ExpertTraffic, spans_of
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass
from terrace.program.block_program.steps import BlockStep, Compute, ComputeKind, Gap, Send, Steps
from terrace.program.instruction import Op
from terrace.simulate.masks import work_in
from terrace.simulate.mixture import Divided, Held, Seconds, launches, passed_seconds
from terrace.simulate.priced_instruction import Doing, Event, PassStep
from terrace.simulate.trained import trained_part
from terrace.simulate.work import Work

if TYPE_CHECKING:
    from terrace.program.program import Program
    from terrace.simulate.inside import InBlockPrices

FORWARD = (ComputeKind.EXPERTS, ComputeKind.SHARED)  # the computing of a forward, in a recomputed backward too
_COMPUTE, _SEND, _WAIT = Doing.COMPUTE, Doing.SEND, Doing.WAIT


class RoutedSeconds(NamedTuple):
    """(Forward, input gradient, weight gradient) seconds of a block's experts on one micro-batch.

    `passed` is the compute between dispatch and combine, cut into `pieces` in a forward and a backward; its weight
    gradients are cut into `chunks`. `shared` is the shared expert.
    """

    passed: Seconds = (0.0, 0.0, 0.0)
    shared: Seconds = (0.0, 0.0, 0.0)
    pieces: int = 1
    chunks: int = 1

    def of(self, step: BlockStep) -> float:
        """Seconds of a step of a pass."""
        if not isinstance(step, Compute):
            return 0.0
        if step.kind is ComputeKind.EXPERT_WEIGHTS:
            # Weight gradients of the shared expert are computed with the first chunk.
            return self.passed[2] / self.chunks + (0.0 if step.number else self.shared[2])
        return {
            ComputeKind.EXPERTS: self.passed[0] / self.pieces,
            ComputeKind.EXPERT_GRADIENTS: self.passed[1] / self.pieces,
            ComputeKind.SHARED: self.shared[0],
            ComputeKind.SHARED_GRADIENTS: self.shared[1],
        }[step.kind]


def routed_seconds(
    program: "Program", block: int, work: Work, traffic: ExpertTraffic = NO_TRAFFIC
) -> tuple[RoutedSeconds, Divided | None]:
    """Compute seconds between the routed messages of a block, and corrections for experts on several ranks.

    The corrections are None where it sends no messages. `traffic` overrides the plan's, unless empty.
    """
    traffic, spec = traffic if traffic.way else program.model.routed.traffic(block), program.blocks[block]
    if not traffic.way:
        return RoutedSeconds(), None
    own = work_in(work, spec, program.cluster.device.type)
    trained = trained_part(spec, program.blocks)
    return priced_experts(program.cluster.device, own, traffic, program.num_micros > 1, trained)


def priced_experts(
    device: Device, work: Work, traffic: ExpertTraffic, accumulate: bool, trained: float = 1.0
) -> tuple[RoutedSeconds, Divided]:
    """Seconds of a layer's experts from a rank's `work`, and corrections for their distribution over ranks.

    `accumulate` as in terrace.simulate.layers; `trained` is the share of weight gradients that are computed.
    """
    # Imported late: terrace.simulate.layers is above this module in the order of imports.
    from terrace.simulate.layers import shared_seconds

    mixture, held = work.layer.mixture, Held(traffic.num_units, traffic.num_rows)
    # Later pieces accumulate their weight gradients.
    sizes = Counter(stop - start for start, stop in spans_of(work.routed * traffic.num_rows, traffic.pieces))
    accumulates = accumulate or traffic.pieces > 1
    parts = [(times, passed_seconds(device, work, mixture, size, accumulates, held)) for size, times in sizes.items()]
    here = [sum(times * seconds[part] for times, seconds in parts) for part in range(3)]
    alone = passed_seconds(device, work, mixture, work.routed, accumulate)
    shared = shared_seconds(device, work, accumulate) if traffic.shares else (0.0, 0.0, 0.0)
    forward_s, input_s, weight_s = (one - all_ for one, all_ in zip(here, alone, strict=True))
    own = RoutedSeconds(
        (here[0], here[1], here[2] * trained),
        (shared[0], shared[1], shared[2] * trained),
        traffic.pieces,
        traffic.chunks[True],
    )
    return own, Divided(forward_s, input_s, weight_s, launches(work, mixture, held, sizes))


def shared_out(
    block: BlockSpec, traffic: ExpertTraffic, flops: float, forward_s: float, weight_s: float
) -> RoutedSeconds:
    """The experts' share of a block's seconds, by their share of its `flops` in a forward."""
    if not traffic.way:
        return RoutedSeconds()
    products = [operation for operation in block.operations.mixture.shared if isinstance(operation, Product)]
    shared_size = sum(product.inputs.numel * product.outputs.numel for product in products)
    active = sum(param.numel for param in block.params if param.is_stack) * traffic.per_token / traffic.num_experts
    passed, shared = (min(0.5, 2 * traffic.tokens * size / flops) for size in (active, shared_size))
    if not shared_size:
        passed = min(1.0, 2 * traffic.tokens * active / flops)
    return RoutedSeconds(
        (passed * forward_s, passed * forward_s, passed * weight_s),
        (shared * forward_s, shared * forward_s, shared * weight_s),
        traffic.pieces,
        traffic.chunks[True],
    )


def ordered(steps: Steps) -> Iterator[tuple[Doing, Compute | Gap | RoutedMessage, int]]:
    """(Action, compute or message, number) of the steps of a pass, as in `PassStep`."""
    sent: dict[int, int] = {}  # the number of each message, by the identity of its step
    newest: dict[tuple[MessageClass, bool, int], int] = {}  # of each chunk, its last hop so far
    for step in steps:
        if isinstance(step, Compute):
            yield Doing.COMPUTE, step, -1
            continue
        if isinstance(step, Gap):
            yield Doing.GAP, step, step.number
            continue
        (message,) = step.messages if isinstance(step, Send) else step.send.messages
        assert isinstance(message, RoutedMessage), "the steps are of experts"
        if isinstance(step, Send):
            # Rows of a chunk must arrive over one tier before they are sent over the next.
            chunk = message.message_class, message.backward, message.chunk
            follows, newest[chunk] = newest.get(chunk, -1), len(sent)
            yield Doing.SEND, message, follows
            sent[id(step)] = len(sent)
        else:
            yield Doing.WAIT, message, sent[id(step.send)]


def pass_steps(
    steps: Steps, op: Op, category: str, block: int, own: RoutedSeconds, prices: "InBlockPrices"
) -> Iterator[PassStep]:
    for does, item, number in ordered(steps):
        if isinstance(item, Compute):
            yield PassStep(does, Event(op, block, own.of(item), -1, category))
            continue
        if isinstance(item, Gap):
            yield PassStep(does, Event(op, block, 0.0, -1, category), number)
            continue
        name = item.message_class.value
        if does is Doing.SEND:
            seconds, penalty = prices.price(item)
            lane = Event(op, block, seconds, item.tier, f"wait {name}", penalty=penalty, message=name)
            yield PassStep(does, lane, number)
        else:
            yield PassStep(does, Event(op, block, 0.0, -1, f"wait {name}"), number)


def alone_s(steps: tuple[PassStep, ...]) -> float:
    """Seconds of steps whose messages share no lane with others."""
    return played_s((does, event.seconds, event.lane, number) for does, event, number in steps)[0]


class Timed(NamedTuple):
    """Begin and end of a step that was played alone, in seconds."""

    does: Doing
    lane: int
    begin_s: float
    end_s: float


def played_s(steps: Iterable[tuple[Doing, float, int, int]], noted: list[Timed] | None = None) -> tuple[float, float]:
    """(Total seconds, seconds of waits) of steps whose messages share no lane with others.

    A step is (action, seconds, lane, number), as in `PassStep`. If `noted` is given, every step is appended to it.
    """
    now_s = waited_s = 0.0
    lanes_s, arrivals_s = dict[int, float](), list[float]()
    for does, seconds, lane, number in steps:
        begin_s = end_s = now_s
        if does is _SEND:
            begin_s = max(now_s, lanes_s.get(lane, 0.0), arrivals_s[number] if number >= 0 else 0.0)
            lanes_s[lane] = end_s = begin_s + seconds
            arrivals_s.append(end_s)
        elif does is _COMPUTE:
            now_s = end_s = now_s + seconds
        elif does is _WAIT and arrivals_s[number] > now_s:
            end_s = arrivals_s[number]
            waited_s += end_s - now_s
            now_s = end_s
        if noted is not None:  # a search plays chunks by the thousand, and notes none of them
            noted.append(Timed(does, lane, begin_s, end_s))
    return now_s, waited_s
