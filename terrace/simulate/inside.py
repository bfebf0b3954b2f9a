"""Seconds of the messages inside a block: what ranks of the tensor axis send one another while they compute.

They take as long, hop by hop, as a collective of the data axis does on its lane (terrace.simulate.cost), with a launch
for each message and what coding in a block format takes. A block waits for most of them where they stand
(terrace.plan.tensor_traffic lists them in order). They travel beside the lanes, and neither slows the other.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
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

    INPUTS = "gradients of inputs"
    WEIGHTS = "gradients of weights"


class Waits(NamedTuple):
    """Seconds of the messages of one instruction: those that are waited for, and those beside which something runs."""

    alone_s: float
    beside_inputs_s: float
    beside_weights_s: float

    def exposed_s(self, input_s: float, weight_s: float, penalty: float) -> float:
        """Return the seconds that are added to computing.

        `input_s` and `weight_s` are what the gradients of inputs and of weights take: what messages may hide behind.
        They are slowed by `penalty` meanwhile, as anything that runs beside a message.
        """
        total = self.alone_s
        for seconds, room_s in ((self.beside_inputs_s, input_s), (self.beside_weights_s, weight_s)):
            covered_s = min(seconds, room_s)
            total += seconds - covered_s + penalty * covered_s
        return total


def waits(program: Program, instruction: Instruction) -> Waits:
    """Return the seconds of the messages inside a FORWARD or a BACKWARD."""
    known: dict[TensorMessage, float] = {}
    total: dict[Behind | None, float] = {None: 0.0, Behind.INPUTS: 0.0, Behind.WEIGHTS: 0.0}
    for message, behind in hidden_behind(program, instruction):
        if message not in known:
            known[message] = math.fsum(message_seconds(program.cluster, program.tensor, message).values())
        total[behind] += known[message]
    return Waits(total[None], total[Behind.INPUTS], total[Behind.WEIGHTS])


def hidden_behind(program: Program, instruction: Instruction) -> list[tuple[TensorMessage, Behind | None]]:
    """Return the messages inside a block in order, each with what the runtime computes meanwhile: None is nothing.

    The one place that says so (terrace.runtime.tensor.line does it). In the backward of attention or MLP the sum over
    the rows that ends it runs beside the weight gradients of its first products, a sum over the columns beside that of
    its last, and the second gather of its input beside the gradients before it. So does the last sum of a head whose
    tokens are whole. Everything else is waited for. The room is the whole block's, not that of attention and MLP apart.
    """
    tensor, index, last = program.tensor, instruction.block, len(program.blocks) - 1
    messages = program.inside(instruction)
    own = [] if instruction.op is Op.FORWARD else block_messages(tensor, program.blocks, index)[1]
    found: list[tuple[TensorMessage, Behind | None]] = [
        (message, None) for message in messages[: len(messages) - len(own)]
    ]
    before = None
    for message in own:
        over_rows = message.axes == tensor.rows.axes
        behind = None
        if message.leg is not Leg.NUMBERS and 0 < index < last:
            after_sum = before is not None and before.leg is Leg.REDUCE
            is_gradient = over_rows and message.leg is Leg.GATHER and after_sum and tensor.splits_tokens
            is_input = over_rows and message.leg is Leg.GATHER and not after_sum
            behind = None if is_gradient else Behind.INPUTS if is_input else Behind.WEIGHTS
        elif message.leg is not Leg.NUMBERS and index == last and over_rows and not tensor.splits_tokens:
            behind = Behind.WEIGHTS
        found.append((message, behind))
        before = message
    return found


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
