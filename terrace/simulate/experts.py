"""Passes of blocks whose experts are on several ranks: computing and messages one after the other, as they run.

Messages of experts take the lanes of tiers, where REDUCE, SYNC and GATHER are too: what they wait for, and what waits
for them, depends on the rest of the step. So such a pass is played step by step (`Rank.run_steps`), along the steps of
the block's own program (terrace.program.block_program.experts).

The experts' computing is what stands between dispatch and combine: rows in order, products, weights, sums. Under even
routing a rank multiplies T k w rows, for T tokens of k experts and every expert cut over w rows, with E/e experts of
inner size I/w. Router, gate and attention come before the messages in a forward, after them in a backward.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from terrace.cluster.cluster import Device
from terrace.model.spec import BlockSpec
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.plan.in_block_messages import ExpertMessage
from terrace.program.block_program.steps import BlockStep, Compute, ComputeKind, Send, Steps
from terrace.program.instruction import Op
from terrace.simulate.inside import InBlockPrices
from terrace.simulate.mixture import Seconds, passed_seconds
from terrace.simulate.rank import Doing, Event, PassStep
from terrace.simulate.work import Work


class ExpertSeconds(NamedTuple):
    """Seconds of a block's experts on one micro-batch, between dispatch and combine."""

    forward_s: float = 0.0
    input_s: float = 0.0
    weight_s: float = 0.0

    def of(self, step: BlockStep, op: Op) -> float:
        """Seconds of a step of a pass; weight gradients may have a pass of their own."""
        if not isinstance(step, Compute):
            return 0.0
        if step.kind is ComputeKind.EXPERTS:
            return self.forward_s
        return self.input_s + (0.0 if op is Op.BACKWARD_INPUT else self.weight_s)


def priced_experts(
    device: Device, work: Work, traffic: ExpertTraffic, accumulate: bool
) -> tuple[ExpertSeconds, Seconds]:
    """Seconds of a layer's experts from a rank's `work`, and how much longer a pass is than with all experts here.

    `accumulate` as in terrace.simulate.layers.
    """
    experts = work.model.experts
    assert experts is not None, "a layer without experts sends nothing to them"
    held = replace(
        experts,
        num_experts=experts.num_experts // traffic.num_units,
        intermediate_size=-(-experts.intermediate_size // traffic.num_rows),
    )
    here = passed_seconds(device, work, held, work.routed * traffic.num_rows, accumulate)
    alone = passed_seconds(device, work, experts, work.routed, accumulate)
    return ExpertSeconds(*here), (here[0] - alone[0], here[1] - alone[1], here[2] - alone[2])


def shared_out(
    block: BlockSpec, traffic: ExpertTraffic, flops: float, forward_s: float, weight_s: float
) -> ExpertSeconds:
    """The experts' part of the seconds of a block that has `flops` in a forward, by their share in it."""
    active = sum(param.numel for param in block.params if param.is_stack) * traffic.per_token / traffic.num_experts
    share = min(1.0, 2 * traffic.tokens * active / flops)
    return ExpertSeconds(share * forward_s, share * forward_s, share * weight_s)


def pass_steps(
    steps: Steps, op: Op, category: str, block: int, own: ExpertSeconds, prices: InBlockPrices
) -> Iterator[PassStep]:
    """The steps of a pass as they are played."""
    sent: list[Send] = []
    before: BlockStep | None = None
    for step in steps:
        if isinstance(step, Compute):
            yield PassStep(Doing.COMPUTE, Event(op, block, own.of(step, op), -1, category))
        elif isinstance(step, Send):
            (message,) = step.messages
            assert isinstance(message, ExpertMessage), "the steps are of experts"
            name, (seconds, penalty) = message.message_class.value, prices.price(message)
            assert not isinstance(before, Send) or before.messages[0].message_class == message.message_class
            # The rows of one tier arrive before they go over the next.
            follows = len(sent) - 1 if isinstance(before, Send) else -1
            lane = Event(op, block, seconds, message.tier, f"wait {name}", penalty=penalty, message=name)
            yield PassStep(Doing.SEND, lane, follows)
            sent.append(step)
        else:
            name = step.send.messages[0].message_class.value
            yield PassStep(Doing.WAIT, Event(op, block, 0.0, -1, f"wait {name}"), sent.index(step.send))
        before = step


def alone_s(steps: tuple[PassStep, ...]) -> float:
    """Seconds of steps whose messages meet no others on their lanes."""
    now_s, lanes_s, arrivals_s = 0.0, dict[int, float](), list[float]()
    for does, event, number in steps:
        if does is Doing.COMPUTE:
            now_s += event.seconds
        elif does is Doing.SEND:
            ready_s = max(now_s, lanes_s.get(event.lane, 0.0), arrivals_s[number] if number >= 0 else 0.0)
            lanes_s[event.lane] = ready_s + event.seconds
            arrivals_s.append(lanes_s[event.lane])
        else:
            now_s = max(now_s, arrivals_s[number])
    return now_s
