"""Software that works in another way than this project, as the planner's own classes with other parts.

`exposed` waits for every message inside a block. `megatron` is Megatron-LM as Narayanan et al. (2104.04473) ran it:
attention that writes its scores, dropout, norms on every tensor rank, a bias of queries, keys and values and a loss in
kernels of their own, messages inside blocks that hide behind nothing, stages that do not compute while they exchange a
micro-batch, and gradients that a pipeline sums over the data ranks after its last backward.
"""

import math
from dataclasses import fields, replace

from bench.validation.stretched import StretchedEvaluator
from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster, Device
from terrace.model.operations import Loss
from terrace.model.spec import BlockSpec, Computes
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass
from terrace.planner.estimate import Estimator
from terrace.planner.inner import Inner
from terrace.planner.parts import Part
from terrace.planner.task import Candidate, Task
from terrace.program.program import Program
from terrace.simulate.cost import Costs
from terrace.simulate.inside import NO_ROUNDS, Rooms, Rounds
from terrace.simulate.kernels import memory_s
from terrace.simulate.layers import LOGIT_BYTES, BlockSeconds
from terrace.simulate.links import hop_s, rate_bytes_per_s
from terrace.simulate.masks import core_keys
from terrace.simulate.work import Work

SYNC = f"wait {MessageClass.SYNC.value}"


class ExposedInner(Inner):
    """Messages inside blocks, all waited for."""

    def rooms(self, forward_s: float, input_s: float, weight_s: float, rounds: Rounds = NO_ROUNDS) -> Rooms:
        return {}


class ExposedCosts(Costs):
    """Costs of a program that waits for all messages inside its blocks."""

    @staticmethod
    def of(costs: Costs) -> "ExposedCosts":
        return ExposedCosts(**{field.name: getattr(costs, field.name) for field in fields(costs)})

    def rooms(self, forward_s: float, input_s: float, weight_s: float, rounds: Rounds) -> Rooms:
        return {}


class ExposedEstimator(Estimator):
    """Estimates with messages inside blocks that hide behind nothing."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.inner = ExposedInner(task)


class ExposedEvaluator(StretchedEvaluator):
    """Evaluates candidates with messages inside blocks that hide behind nothing; no program runs this way."""

    def program(self, part: Part, candidate: Candidate, micros: int) -> tuple[Program, Costs]:
        program, costs = super().program(part, candidate, micros)
        return program, ExposedCosts.of(costs)


class _MegatronInner(ExposedInner):
    def plan(self, mesh: Mesh) -> Plan:
        return replace(super().plan(mesh), sequence_parallel=False)


class MegatronEstimator(Estimator):
    """Estimates of Megatron-LM's blocks and of its blocking sends."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.inner = _MegatronInner(task)
        self._flash = False

    def work(self, mesh: Mesh, micro_batch: int, recompute: int = 0) -> Work:
        return replace(super().work(mesh, micro_batch, recompute), sequence_parallel=False)

    def compute(
        self, kind: int, mesh: Mesh, micro_batch: int, accumulate: bool, pieces: int | None = None
    ) -> BlockSeconds:
        own = super().compute(kind, mesh, micro_batch, accumulate, pieces)
        device, work = self.task.cluster.device, self.work(mesh, micro_batch)
        if self.specs[kind].attends:
            return megatron_layer(own, device, work)
        spec = self.specs[kind]
        return megatron_loss(own, device, work, spec) if spec.computes is Computes.LOGITS else own

    def boundary_s(self, mesh: Mesh, micro_batch: int) -> float:
        return 0.0  # in `sending_s`: the message is part of the tasks of both stages

    def sending_s(self, mesh: Mesh, micro_batch: int) -> float:
        message_s, part = super().boundary_s(mesh, micro_batch), self._boundary_bytes(mesh, micro_batch)
        # The parts are put together on the other side (section 4.1 there).
        whole_s = gather_s(self.task.cluster, mesh.group("tensor"), part * mesh.total("tensor"))
        return message_s + whole_s if message_s else 0.0


class MegatronEvaluator(ExposedEvaluator):
    """Evaluates candidates as Megatron-LM runs them."""

    def plan(self, candidate: Candidate) -> Plan:
        return replace(super().plan(candidate), sequence_parallel=False)

    def lines(self, candidate: Candidate) -> list[dict[str, float]]:
        # Not overlapped: the messages of the blocks follow each other.
        # Every parameter is summed over the data ranks, those that all tensor ranks have, too.
        sync = self.prices.messages.lines(candidate.mesh.state, candidate.placement).each[3]
        numels = self.estimator.numels.all(candidate.mesh)
        of_kind = [sync.base_s + numel * sync.each_s if numel else 0.0 for numel in numels]
        parts = self.stages(candidate)[0].parts
        sums = [math.fsum(count * of_kind[kind] for kind, count in part.runs) for part in parts]
        return [line | {SYNC: sync_s} for line, sync_s in zip(super().lines(candidate), sums, strict=True)]


def exposed(task: Task) -> ExposedEvaluator:
    """An evaluator of `task` that waits for every message inside a block."""
    return ExposedEvaluator(task, ExposedEstimator(task))


def megatron(task: Task) -> MegatronEvaluator:
    """An evaluator of `task` under Megatron-LM."""
    return MegatronEvaluator(task, MegatronEstimator(task))


def megatron_layer(own: BlockSeconds, device: Device, work: Work) -> BlockSeconds:
    """Seconds of Megatron-LM's layer: dropout, and its handling of queries, keys and values (`layout_s`)."""
    own = with_dropout(own, device, work)
    return replace(own, forward_s=own.forward_s + layout_s(device, work))


def layout_s(device: Device, work: Work) -> float:
    """Seconds that a forward of Megatron-LM's attention adds to this project's.

    The bias of queries, keys and values is added in a kernel of its own, read and written
    (`LinearWithGradAccumulationAndAsyncCommunication` in megatron/core/tensor_parallel/layers.py); they are used where
    they lie, and the output of attention alone is laid out. This project adds the bias inside the product and lays the
    operands out, as many bytes as that kernel moves. The layout of the output is left to add.
    """
    output = work.tokens * work.attended_heads * work.layer.core.head_dim * FORMATS[work.compute].element_bytes
    return memory_s(device, 2 * output)


# Bytes that `_VocabParallelCrossEntropy` and the copies to and from fp32 around it move of a logit. Forward: copy 6,
# maximum 4, subtraction 8, exponent 8, sum 4, division 8; backward: product 8, copy 6.
_LOSS_BYTES, _LOSS_KERNELS = (6 + 4 + 8 + 8 + 4 + 8, 8 + 6), (6, 2)


def megatron_loss(own: BlockSeconds, device: Device, work: Work, head: BlockSpec) -> BlockSeconds:
    """Seconds of logits under Megatron-LM's loss, whose operations are kernels of their own."""
    (loss,) = head.operations.of(Loss)
    logits = work.tokens * math.ceil(loss.vocabulary / work.tensor)
    more_s = [
        memory_s(device, (num_bytes - LOGIT_BYTES / 2) * logits, num_kernels - 2)
        for num_bytes, num_kernels in zip(_LOSS_BYTES, _LOSS_KERNELS, strict=True)
    ]
    return replace(own, forward_s=own.forward_s + more_s[0], input_s=own.input_s + more_s[1])


def with_dropout(own: BlockSeconds, device: Device, work: Work) -> BlockSeconds:
    """Seconds of a layer whose plain attention and two residual sums have dropout."""
    more_s = sum(dropout_s(device, work))
    return replace(own, forward_s=own.forward_s + more_s, input_s=own.input_s + more_s)


def dropout_s(device: Device, work: Work) -> tuple[float, float]:
    """Seconds of dropout each way in a layer's attention, and in its two residual sums; its mask has a byte an element.

    The scores are read and written once more, 5 bytes each in bf16 with the mask.
    """
    keys, _ = core_keys(work, device.type)
    queries = math.ceil(work.attended / work.micro_batch)
    scores = work.micro_batch * work.attended_heads * queries * keys
    sums = work.tokens * 2 * work.layer.hidden.numel / work.stream_cut
    return memory_s(device, (2 * FORMATS[work.compute].element_bytes + 1) * scores), memory_s(device, sums, 0)


def cudnn_of_2024(cluster: Cluster) -> Cluster:
    """A cluster of Hopper devices with the attention that cuDNN had in 2024.

    Causal, 539 TFLOP/s forward with heads of 128 and 388 with 64 at 16k keys, 315 and 225 at 512; backward 516 and 433,
    not causal, times the 0.906 that a mask costs forward (Shah et al. 2407.08608, figures 5 and 6).
    """
    older = replace(
        cluster.device.kernels,
        attention=0.545,
        attention_backward=0.473,
        attention_half_keys=300.0,
        attention_half_keys_backward=0.0,
    )
    return replace(cluster, device=replace(cluster.device, kernels=older))


def gather_s(cluster: Cluster, group: tuple[int, ...], num_bytes: float) -> float:
    """Seconds until every rank of a group holds all `num_bytes`, starting from one part each; as long as a reduction.

    `group` is the degrees of its ranks by tier. Hop after hop, as the messages of a program are priced. Raises
    `ClusterError` for a group that the cluster cannot hold.
    """
    sizes = tuple(tier.size for tier in cluster.tiers)
    if len(group) > len(sizes) or not all(1 <= degree <= size for degree, size in zip(group, sizes, strict=False)):
        raise ClusterError(f"a group of {group} ranks by tier: cluster {cluster.name!r} has {sizes}")
    total_s = 0.0
    for tier, degree in enumerate(group):
        if degree > 1 and num_bytes:
            total_s += hop_s(cluster, tier, degree, num_bytes * (degree - 1) / degree)
            # Each member of this tier brings 1 / degree of the bytes, gathered over the outer tiers.
            num_bytes /= degree
    return total_s + cluster.device.kernels.launch_s if total_s else 0.0


def ring_s(cluster: Cluster, group: tuple[int, ...], num_bytes: float) -> float:
    """Seconds of `gather_s` along one ring over all ranks of the group, at the rate of its slowest tier.

    A ring crosses a tier of `degree` members once for every member; all adapters of a node carry rings at once. The
    parts cross the tiers together, and a step's latency is that of the tier that it crosses.
    """
    num_ranks = math.prod(group)
    if num_ranks == 1 or not num_bytes:
        return 0.0
    seconds, latency_s, outer = 0.0, 0.0, 1
    for tier, degree in reversed(list(enumerate(group))):
        if degree == 1:
            continue
        here, inner = cluster.tiers[tier], math.prod(group[:tier])
        # Members leave by as many links as they have ranks, each with an equal part of the bytes.
        rate = inner * rate_bytes_per_s(cluster, tier, num_bytes / inner, degree=degree)
        seconds = max(seconds, num_bytes * (num_ranks - 1) / num_ranks / rate)
        latency_s += outer * (degree - 1) * here.latency_s
        outer *= degree
    return seconds + latency_s + cluster.device.kernels.launch_s
