"""Seconds of the messages inside a block: what ranks of the tensor axis send one another while they compute.

They take as long, hop by hop, as a collective of the data axis does on its lane (terrace.simulate.cost), with a launch
for each message and what coding in a block format takes. A block waits for most of them where they stand
(terrace.plan.tensor_traffic lists them in order). They travel beside the lanes, and neither slows the other.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from terrace.cluster import Cluster
from terrace.plan.hops import hops_coding_bytes
from terrace.plan.tensor_traffic import Leg, Tensor, TensorMessage, block_messages
from terrace.plan.wire import MessageClass
from terrace.program import Instruction, Op, Program
from terrace.simulate.links import hop_s

WAIT_TENSOR = f"wait {MessageClass.TENSOR.value}"  # the category of their seconds, of a clock as of a prediction


def inside_seconds(cluster: Cluster, tensor: Tensor, messages: Iterable[TensorMessage]) -> dict[int, float]:
    """Return the seconds of messages one after the other, by tier index; a launch counts on the first tier crossed."""
    total: dict[int, float] = defaultdict(float)
    for message in messages:
        for tier, seconds in message_seconds(cluster, tensor, message).items():
            total[tier] += seconds
    return dict(total)


class Behind(Enum):
    """What is computed while a message travels."""

    FORWARD = "outputs"
    INPUTS = "gradients of inputs"
    WEIGHTS = "gradients of weights"


Hidden = tuple[TensorMessage, Behind | None]


class Waits(NamedTuple):
    """Seconds of the messages of one instruction: those that are waited for, and those beside which something runs."""

    alone_s: float
    beside_inputs_s: float
    beside_weights_s: float
    beside_forward_s: float = 0.0

    @property
    def unhidden(self) -> "Waits":
        """The same messages where nothing runs beside any."""
        return Waits(sum(self), 0.0, 0.0)

    def exposed_s(self, input_s: float, weight_s: float, penalty: float, forward_s: float = 0.0) -> float:
        """Return the seconds that are added to computing.

        `input_s`, `weight_s` and `forward_s` are what the gradients of inputs and of weights and the outputs take: what
        messages may hide behind. They are slowed by `penalty` meanwhile, as anything that runs beside a message.
        """
        total = self.alone_s
        rooms = (self.beside_inputs_s, input_s), (self.beside_weights_s, weight_s), (self.beside_forward_s, forward_s)
        for seconds, room_s in rooms:
            covered_s = min(seconds, room_s)
            total += seconds - covered_s + penalty * covered_s
        return total


def waits(program: Program, instruction: Instruction) -> Waits:
    """Return the seconds of the messages inside a FORWARD or a BACKWARD."""
    cluster, tensor = program.cluster, program.tensor

    def price(message: TensorMessage) -> float:
        return math.fsum(message_seconds(cluster, tensor, message).values())

    return waits_of(hidden_counts(program, instruction), price)


def waits_of(counts: Mapping[Hidden, int], price: Callable[[TensorMessage], float]) -> Waits:
    """Return the seconds of messages that are sent so many times each, of which one takes what `price` says."""
    total: dict[Behind | None, float] = dict.fromkeys((None, *Behind), 0.0)
    for (message, behind), count in counts.items():
        total[behind] += count * price(message)
    return Waits(total[None], total[Behind.INPUTS], total[Behind.WEIGHTS], total[Behind.FORWARD])


def hidden_counts(program: Program, instruction: Instruction) -> dict[Hidden, int]:
    """Return how often each of the messages inside a FORWARD or a BACKWARD is sent beside the same computing.

    They do not depend on the tiers on which the ranks are.
    """
    return dict(Counter(hidden_behind(program, instruction)))


def hidden_behind(program: Program, instruction: Instruction) -> list[Hidden]:
    """Return the messages inside a block in order, each with what the runtime computes meanwhile: None is nothing.

    The one place that says so (terrace.runtime.tensor does it). In the backward of attention or MLP the sum over the
    rows that ends it runs beside the weight gradients of its first products, a sum over the columns beside that of its
    last, and the second gather of its input beside the gradients before it. So does the last sum of a head whose tokens
    are whole. Of messages in parts (`Plan.tensor_chunks`) the first part that is gathered and the last that is summed
    are waited for; the others run beside the products of their neighbours. Everything else is waited for. The room is
    the whole block's, not that of attention and MLP apart.
    """
    tensor = program.tensor
    forward, backward = block_messages(tensor, program.blocks, instruction.block)
    has_regions = all(any(each.leg is Leg.REDUCE for each in messages) for messages in (forward, backward))
    num_parts = len(tensor.token_chunks) if has_regions and tensor.splits_tokens else 1
    if instruction.op is Op.FORWARD:
        return _forward(tensor, forward, num_parts)
    again = program.inside(instruction)
    again = again[: len(again) - len(backward)]  # the forward of a block that is recomputed
    regathers = tensor.splits_tokens and not again
    found = _backward(tensor, backward, num_parts, regathers) if has_regions else _outer_backward(tensor, backward)
    return [*_forward(tensor, again, num_parts), *found]


def _forward(tensor: Tensor, messages: Sequence[TensorMessage], num_parts: int) -> list[Hidden]:
    found: list[Hidden] = []
    passed = dict.fromkeys(Leg, 0)
    for message in messages:
        behind = None
        if message.axes == tensor.rows.axes:
            waited_for = num_parts - 1 if message.leg is Leg.REDUCE else 0
            behind = None if passed[message.leg] % num_parts == waited_for else Behind.FORWARD
            passed[message.leg] += 1
        found.append((message, behind))
    return found


def _backward(tensor: Tensor, messages: Sequence[TensorMessage], num_parts: int, regathers: bool) -> list[Hidden]:
    """Of attention and MLP: their gradient in parts, the sum, what columns add, and perhaps the input once more."""
    found: list[Hidden] = []
    gathered = 0  # over the rows, of the region
    for message in messages:
        behind: Behind | None = Behind.WEIGHTS
        if message.leg is Leg.NUMBERS:
            behind = None
        elif message.leg is Leg.GATHER and message.axes == tensor.rows.axes and tensor.splits_tokens:
            behind = Behind.INPUTS if gathered else None
            gathered = (gathered + 1) % (num_parts + regathers)
        found.append((message, behind))
    return found


def _outer_backward(tensor: Tensor, messages: Sequence[TensorMessage]) -> list[Hidden]:
    """Of embedding and head: only a head whose tokens are whole sums its gradient beside that of its weight."""
    rows, splits = tensor.rows.axes, tensor.splits_tokens
    return [
        (each, Behind.WEIGHTS if each.axes == rows and each.leg is not Leg.NUMBERS and not splits else None)
        for each in messages
    ]


def message_seconds(cluster: Cluster, tensor: Tensor, message: TensorMessage) -> dict[int, float]:
    """Return the seconds of one message by tier index."""
    degrees, total = tensor.line(message.axes).degrees, dict[int, float]()
    for tier, num_bytes in tensor.sends(message):
        total[tier] = hop_s(cluster, tier, degrees[tier], num_bytes)
    if total:
        total[next(iter(total))] += cluster.device.kernels.launch_s + _coding_s(cluster, tensor, message)
    return total


def _coding_s(cluster: Cluster, tensor: Tensor, message: TensorMessage) -> float:
    if message.leg is Leg.NUMBERS:
        return 0.0
    hops, device = tensor.hops(message), cluster.device
    reduction, gathering = (hops, []) if message.leg is Leg.REDUCE else ([], hops)
    num_bytes = hops_coding_bytes(tensor.plan, MessageClass.TENSOR, reduction, gathering)
    return num_bytes / (device.memory_bandwidth_bytes_per_s * device.kernels.codec)
