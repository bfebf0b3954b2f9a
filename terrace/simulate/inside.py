"""Seconds of the messages inside a block: what ranks of the tensor axis send one another while they compute.

The block waits for each of them where it stands (terrace.plan.tensor_traffic lists them in order), hop by hop, as a
collective of the data axis would take on its lane (terrace.simulate.cost), with a launch for each message and what
coding in a block format takes. They travel beside the lanes, and neither slows the other.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from terrace.cluster import Cluster
from terrace.plan.hops import hops_coding_bytes
from terrace.plan.tensor_traffic import Leg, Tensor, TensorMessage
from terrace.plan.wire import MessageClass
from terrace.simulate.links import hop_s

WAIT_TENSOR = f"wait {MessageClass.TENSOR.value}"  # the category of their seconds, of a clock as of a prediction

# Which part of a message's seconds the block waits for. The runtime computes nothing meanwhile, so all of it; where it
# comes to hide some kind behind a product (the sum of an input's gradient behind that of weights, say), say so here.
EXPOSED: Mapping[Leg, float] = {Leg.GATHER: 1.0, Leg.REDUCE: 1.0, Leg.NUMBERS: 1.0}


def inside_seconds(cluster: Cluster, tensor: Tensor, messages: Iterable[TensorMessage]) -> dict[int, float]:
    """Return the seconds that a block waits for its messages, by tier index; coding counts where it is done."""
    total: dict[int, float] = defaultdict(float)
    for message in messages:
        for tier, seconds in message_seconds(cluster, tensor, message).items():
            total[tier] += EXPOSED[message.leg] * seconds
    return dict(total)


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
