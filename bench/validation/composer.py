"""llm-foundry on Composer and FSDP: passes over memory and messages of a micro-batch that this project does not have.

The published rows come from two states of it. Those with FSDP's mixed precision `PURE` ran llm-foundry 0.0.4 on torch
1.13.1 (the defaults of their `submit_benchmarks.py`). Those with `DEFAULT` ran version 0.3.0 on a nightly build of
torch 2.1 of 2023-08-27: the column `Image` of their `h100new.md` at commit beb8dee6922c, where the figures are the same
ones. The rows on 128 and more H100 are in neither file; they came later, so version 2.1 is assumed.

What is not priced has no published cost: the data loader, callbacks, the walk over all modules that switches them to
evaluation for the metrics, an allocator that is short of memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.validation.software import ring_s
from terrace.cluster.cluster import Cluster, Device
from terrace.model.operations import Loss, Product
from terrace.model.spec import BlockSpec
from terrace.plan.wire import FORMATS
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.layers import BlockSeconds, seconds_of
from terrace.simulate.work import Work

PARAM_BYTES = 2  # a gathered parameter, and its gradient before the reduction
# Composer's metrics of a training batch, LanguageCrossEntropy and LanguagePerplexity, each compute torch's cross
# entropy of all logits again, under autocast in fp32: a copy 2 + 4 and the logarithm of the softmax 4 + 4 bytes a
# logit (`_eval_train_metrics` of composer/trainer/trainer.py; llm-foundry's pull request 642 made them optional later).
_METRICS, _METRIC_BYTES, _METRIC_KERNELS = 2, 6 + 8, 3
# The loss is fused (`loss_fn: fused_crossentropy`): logits are read, and read and written for their gradient.
_LOSS_BYTES, _LOSS_KERNELS = 2 + 2 + 2, 2
# What Composer's DecoupledAdamW reads and writes of a shard's parameter in fp32, one kernel an operation: two moments
# 8 + 12 each, root, division and sum 8 each, update 16 (its source, `adamw`; no decay, `weight_decay: 0.0` in all
# `scripts/train/yamls/mpt`); and the norm and its scale 12.
OPTIMIZER_BYTES = 92


@dataclass(frozen=True, kw_only=True)
class Software:
    """A state of the software, by the mixed precision of its rows."""

    reduced_bytes: int  # of a gradient in its reduction
    stops_early: bool  # recomputation ends with the last tensor that a backward needs


# Early stop is the default of `checkpoint` without reentrance since torch 2.1 (pull request 96866).
SOFTWARE = {
    "PURE": Software(reduced_bytes=2, stops_early=False),
    "DEFAULT": Software(reduced_bytes=4, stops_early=True),
}


def micro_batch_s(
    cluster: Cluster, specs: Sequence[BlockSpec], work: Work, software: Software, num_micros: float
) -> tuple[float, float, float]:
    """(computing, messages beside it, messages that nothing hides) seconds of a micro-batch, one of `num_micros`.

    A layer is a unit of FSDP; embedding, positions and the last norm are the outermost one, which stays whole from the
    forward to the backward. A micro-batch begins with its gather, since the stream of gathers first waits for the
    computation before it; the first layer's gather runs beside the look-up alone. It ends with its reduction, for which
    the computation waits (`_post_backward_final_callback`); the first layer's reduction runs beside the gradient of the
    look-up. Everything else has products beside it.
    """
    device, layers, group = cluster.device, len(specs) - 2, tuple(tier.size for tier in cluster.tiers)
    look_up, layer = seconds_of(device, work, specs[0]), layer_seconds(device, work, specs[1], software)
    outer_params, layer_params = specs[0].num_trainable + specs[-1].num_trainable, specs[1].num_trainable
    gather_s = ring_s(cluster, group, PARAM_BYTES * layer_params)
    reduce_s = ring_s(cluster, group, software.reduced_bytes * layer_params)
    params = outer_params + layers * layer_params
    passes = float(gradient_bytes(software.reduced_bytes) * params)
    passes += shard_bytes(software, num_micros) * params / cluster.world_size
    passes += _CAST_BYTES * (outer_params + 2 * layers * layer_params) / cluster.world_size
    compute_s = look_up.forward_s + look_up.backward_s + layers * (layer.forward_s + layer.backward_s)
    compute_s += head_s(device, work, specs[-1]) + memory_s(device, passes)
    alone_s = ring_s(cluster, group, PARAM_BYTES * outer_params)
    alone_s += ring_s(cluster, group, software.reduced_bytes * outer_params)
    alone_s += max(0.0, gather_s - look_up.forward_s) + max(0.0, reduce_s - look_up.backward_s)
    beside_s = (2 * layers - 1) * gather_s + (layers - 1) * reduce_s
    return compute_s, beside_s, alone_s


def layer_seconds(device: Device, work: Work, layer: BlockSpec, software: Software) -> BlockSeconds:
    """Seconds of a layer whose queries, keys and values are parts of one product's result.

    Their gradients are joined for that product (`chunk` in llmfoundry/models/layers/attention.py), 6 elements read and
    written a token. With an early stop recomputation ends before the last product, since it keeps nothing but what it
    reads: that product and the sum after it are left out.
    """
    seconds = seconds_of(device, work, layer)
    stream = FORMATS[work.compute].element_bytes * work.tokens * work.layer.hidden.numel
    recompute_s = seconds.recompute_s
    if recompute_s and software.stops_early:
        down = layer.operations.of(Product)[-1]
        recompute_s -= gemm_s(device, work.tokens, down.inputs.numel, down.outputs.numel, 1, work.compute)
        recompute_s -= memory_s(device, 3 * stream)
    return replace(seconds, input_s=seconds.input_s + memory_s(device, 2 * 3 * stream), recompute_s=recompute_s)


def head_s(device: Device, work: Work, head: BlockSpec) -> float:
    """Seconds of the last norm, the logits, their loss and their metrics, forward and backward.

    The matrix is that of the embedding, so the gradients of both uses are added.
    """
    (loss,) = head.operations.of(Loss)
    tokens, hidden, vocab = work.tokens, loss.source.features.numel, loss.vocabulary
    item = FORMATS[work.compute].element_bytes
    shapes = (tokens, hidden, vocab), (tokens, vocab, hidden), (hidden, tokens, vocab)
    products_s = sum(gemm_s(device, *shape, 1, work.compute) for shape in shapes)
    norm_s = memory_s(device, (2 + 5) * item * tokens * hidden, 3)
    logits = (_LOSS_BYTES + _METRICS * _METRIC_BYTES) * tokens * vocab
    logits_s = memory_s(device, logits, _LOSS_KERNELS + _METRICS * _METRIC_KERNELS)
    return products_s + norm_s + logits_s + memory_s(device, 3 * item * vocab * hidden)


# A shard is kept in fp32 and cast for every gather of it (`_use_low_precision_shard` of FSDP's flat parameter).
_CAST_BYTES = 4 + PARAM_BYTES


def gradient_bytes(reduced_bytes: int) -> int:
    """Bytes that FSDP moves for the gradient of a parameter before its message.

    The gradients of a block's parameters are joined to the flat one, cast where the reduction has another dtype, and
    divided before the reduction (torch/distributed/fsdp/_runtime_utils.py, `_post_backward_hook` and `_reduce_grad`).
    """
    joined, divided = 2 * PARAM_BYTES, 2 * reduced_bytes
    cast = PARAM_BYTES + reduced_bytes if reduced_bytes != PARAM_BYTES else 0
    return joined + cast + divided


def shard_bytes(software: Software, num_micros: float) -> float:
    """Bytes that FSDP moves for the reduced gradient of a shard's parameter, in the mean over micro-batches.

    It is divided once more, cast to fp32 where it is not, and added to that of earlier micro-batches (the same file,
    `_reduce_grad` and `_accumulate_sharded_grad`).
    """
    divided = 2 * software.reduced_bytes
    cast = software.reduced_bytes + 4 if software.reduced_bytes != 4 else 0
    return divided + cast + 3 * 4 * max(0.0, 1 - 1 / num_micros)
