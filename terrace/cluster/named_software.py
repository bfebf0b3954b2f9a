"""The software that a plan can be predicted under, and the cluster that it runs on.

A named software is priced from what its source code does: bytes that it moves, kernels that it launches, messages that
it waits for. No figure here was taken from the seconds of a step. A name with a year is an older state. `NAMED` are
those that a command offers; a band of one is taken from steps of all states of it (`Software.family`).
"""

from collections.abc import Mapping
from dataclasses import replace

from terrace.base.errors import ClusterError, did_you_mean
from terrace.cluster.cluster import Cluster
from terrace.cluster.device import Device, Kernels
from terrace.cluster.software import OWN, KernelForms, MessageForms, PlanForms, Software

# Forward: copy to fp32 6, maximum 4, subtraction 8, exponent 8, sum 4, division 8; backward: product 8, copy 6
# (`_VocabParallelCrossEntropy` in megatron/core/tensor_parallel/cross_entropy.py).
_PARALLEL_LOSS = ((6 + 4 + 8 + 8 + 4 + 8, 7), (8 + 6, 3))

# bucket_size of DistributedDataParallel in Megatron-Core: 40 million elements, or a million for each data rank.
_MEGATRON_BUCKET = 40e6, 1e6

# Megatron-LM's distributed optimizer shards optimizer states, its schedules are 1F1B with or without chunks, and
# `--recompute-granularity selective` recomputes the core of attention. Without Transformer Engine there is no context
# axis (DotProductAttention in megatron/core/transformer/dot_product_attention.py asserts it).
_MEGATRON_PLANS = PlanForms(
    axes=frozenset(("tensor", "pipeline", "experts")),
    states=frozenset(("ddp", "zero1")),
    schedules=frozenset(("1f1b", "interleaved")),
    parts=frozenset(("attention",)),
)
# Transformer Engine's attention has both forms of context (`cp_comm_type`: p2p and a2a).
_TE_PLANS = replace(
    _MEGATRON_PLANS, axes=_MEGATRON_PLANS.axes | {"ulysses", "ring"}, products=frozenset(("fp8", "fp8+e4m3"))
)

_MEGATRON_2021 = Software(
    name="megatron-2021",
    plans=_MEGATRON_PLANS,
    kernels=KernelForms(flash=False, dropout=True, bias_apart=True, loss=_PARALLEL_LOSS),
    messages=MessageForms(
        rings=True, bucket=_MEGATRON_BUCKET, exposed=frozenset(("tensor", "pipeline", "pipeline_backward", "sync"))
    ),
    source="Megatron-LM as Narayanan et al. 2104.04473 ran it: attention that writes its scores, dropout, a bias of "
    "queries, keys and values in a kernel of its own (LinearWithGradAccumulationAndAsyncCommunication in "
    "megatron/core/tensor_parallel/layers.py), the loss of _VocabParallelCrossEntropy; messages inside blocks are "
    "waited for, stages do not compute while they send (section 4.1 there), gradients are summed after the last "
    "backward",
)
_MEGATRON_2022 = replace(
    _MEGATRON_2021,
    name="megatron-2022",
    messages=replace(_MEGATRON_2021.messages, exposed=_MEGATRON_2021.messages.exposed - {"tensor"}),
    source="Megatron-LM as Korthikanti et al. 2205.05198 ran it: as in 2021, but that gradients of inputs travel "
    "beside products of weight gradients (LinearWithGradAccumulationAndAsyncCommunication)",
)
_MEGATRON = Software(
    name="megatron",
    plans=_MEGATRON_PLANS,
    kernels=KernelForms(attention="flash2", transposes=True, loss=_PARALLEL_LOSS),
    messages=MessageForms(
        rings=True,
        bucket=_MEGATRON_BUCKET,
        exposed=frozenset(("sync", "refresh")),
        waits_for_sends=True,
        reduced="fp32",
    ),
    source="Megatron-LM without Transformer Engine, as its arguments are by default: flash attention 2, whose operands "
    "and result are laid out by row (FlashSelfAttention in megatron/legacy/model/transformer.py), the loss of "
    "_VocabParallelCrossEntropy; gradients travel in fp32 under --bf16 (megatron/training/arguments.py), "
    "overlap_grad_reduce and overlap_param_gather are off (DistributedDataParallelConfig), sends of 1F1B are waited "
    "for (overlap_p2p_comm is of interleaved schedules alone); NCCL's ring over a whole group",
)
_TE = Software(
    name="te",
    plans=_TE_PLANS,
    kernels=KernelForms(scales="current"),
    messages=MessageForms(rings=True, bucket=_MEGATRON_BUCKET, fuses=True),
    source="Megatron-Core with Transformer Engine as NVIDIA's recipes run it (Megatron Bridge 25.11): tensor messages "
    "fused with products (tp_comm_overlap), reductions and gathers beside computing, gradients in bf16 "
    "(grad_reduce_in_fp32 off); in 8 bits, codes of weights once a step, one kernel for the codes of a gradient and "
    "of its transpose, a largest magnitude in a pass of its own (current scaling); NCCL's ring over a whole group",
)
# reshard_after_forward: parameters stay whole until the backward (priced as ZeRO-2), are sharded again, or over fewer
# ranks; the schedules are those of torch.distributed.pipelining that this runtime has, too.
_FSDP2_PLANS = PlanForms(
    axes=frozenset(("tensor", "ring", "pipeline", "experts")),
    states=frozenset(("ddp", "zero2", "zero3", "copies")),
    schedules=frozenset(("1f1b", "gpipe", "breadth-first", "interleaved", "zbv")),
    products=frozenset(("fp8", "fp8:row")),
)
_FSDP2 = Software(
    name="fsdp2",
    plans=_FSDP2_PLANS,
    kernels=KernelForms(attention="flash2", stops_early=True, optimizer_bytes=28 + 4 + 8),
    messages=MessageForms(
        rings=True,
        exposed=frozenset(("tensor",)),
        exposed_ends=True,
        reduced="fp32",
        gather_copies=(4, 6 + 4),
        reduce_copies=(6, 0),
    ),
    source="fully_shard of PyTorch, compiled, as torchtitan runs it: a gathered buffer is copied to the parameters (2 "
    "+ 2 bytes), a shard in fp32 is cast and copied into the buffer (6 + 4), gradients are copied to the buffer of "
    "their reduction in fp32 (2 + 4): torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, "
    "foreach_all_gather_copy_out, _get_param_all_gather_inputs, foreach_reduce; a micro-batch ends with a wait for its "
    "reductions (_root_post_backward_final_callback); DTensor's messages of a tensor axis are waited for, since both "
    "gradients of a product come before its redistribution; flash attention 2, which "
    "scaled_dot_product_attention prefers (pull request 48163 of transformers; where a build prefers cuDNN's on "
    "Hopper, pull request 162073 of torch, attention is faster); recomputation stops early (pull request 96866 of "
    "torch); fused AdamW 28, the norm 4 and its scale 8; NCCL's ring over a whole group",
)
_DEEPSPEED = Software(
    name="deepspeed",
    # Stages 0 to 3, the secondary partition of ZeRO++ (zero_hpz_partition_size), and DeepSpeed-Ulysses. Its pipelines
    # and tensor ranks are not described.
    plans=PlanForms(axes=frozenset(("ulysses",)), states=frozenset(("ddp", "zero1", "zero2", "zero3", "copies"))),
    kernels=KernelForms(attention="flash2"),
    messages=MessageForms(
        rings=True,
        bucket=(5e8, 0.0),
        exposed_unsharded=frozenset(("reduce", "sync", "refresh")),
        gather_copies=(4, 4),
        reduce_copies=(4 + 4, 0),
    ),
    grad_bytes=2,
    gathering_allocator=1 / (1 - 0.15),
    source="DeepSpeed's ZeRO over layers with flash attention 2: overlap_comm is on by default under stage 3 alone "
    "(DeepSpeedZeroConfig in deepspeed/runtime/zero/config.py), and updated parameters are gathered after the step; "
    "partitions are joined before a gather and after it (AllGatherCoalescedHandle in partition_parameters.py), "
    "gradients are copied to a bucket and divided (stage3.py, stage_1_and_2.py); gradients of bf16 stay in bf16 "
    "(communication_data_type and grad_accum_dtype of runtime/engine.py); memory that torch's allocator loses to "
    "fragments in runs with ZeRO-3: 15 % in the mean (Guo et al. 2401.08156). Kernels of a model that is not "
    "compiled are not described",
)
_NANOTRON = Software(
    name="nanotron",
    # ParallelismArgs and zero_stage of src/nanotron/config; `recompute_layer` is of whole layers.
    plans=PlanForms(
        axes=frozenset(("tensor", "ring", "pipeline", "experts")),
        states=frozenset(("ddp", "zero1")),
        schedules=frozenset(("1f1b", "gpipe")),
    ),
    kernels=KernelForms(attention="flash2", loss=_PARALLEL_LOSS),
    messages=MessageForms(rings=True, exposed=frozenset(("tensor", "refresh")), waits_for_sends=True, reduced="fp32"),
    source="nanotron: flash attention 2; tensor messages are waited for (tp_linear_async_communication is off by "
    "default), gradients are accumulated and reduced in fp32 beside the last backward (optim/gradient_accumulator.py), "
    "updated parameters are gathered after the step (ZeroDistributedOptimizer._all_gather_params in optim/zero.py), "
    "sends of 1F1B are waited for; a loss of one kernel an operation in fp32 (parallel/tensor_parallel/functional.py)",
)
# Composer's metrics of a training batch, LanguageCrossEntropy and LanguagePerplexity, each compute torch's cross
# entropy of all logits again, under autocast in fp32: a copy 2 + 4 and the logarithm of the softmax 4 + 4 bytes a
# logit (`_eval_train_metrics` of composer/trainer/trainer.py; llm-foundry's pull request 642 made them optional later).
# The loss is fused (`loss_fn: fused_crossentropy`): logits are read, and read and written for their gradient.
_METRICS_LOSS = ((2 + 2 * (6 + 8), 1 + 2 * 3), (2 + 2, 1))
_COMPOSER = Software(
    name="composer",
    plans=PlanForms(axes=frozenset(), states=frozenset(("zero2", "zero3"))),
    kernels=KernelForms(attention="triton", joins=True, loss=_METRICS_LOSS, stops_early=True, optimizer_bytes=92),
    messages=MessageForms(
        rings=True, exposed_ends=True, reduced="fp32", gather_copies=(0, 6), reduce_copies=(4 + 6 + 8, 8)
    ),
    source="llm-foundry 0.3.0 on Composer, FSDP and a nightly build of torch 2.1: attention in Triton, two metrics of "
    "every batch over all logits, an optimizer of one kernel an operation (two moments 8 + 12 each, root, division "
    "and sum 8 each, update 16, norm and scale 12: DecoupledAdamW), gradients that are joined, cast to fp32 and "
    "divided, shards that are cast for every gather and divided again (torch/distributed/fsdp/_runtime_utils.py)",
)
_COMPOSER_OLD = replace(
    _COMPOSER,
    name="composer-2023",
    kernels=replace(_COMPOSER.kernels, stops_early=False),
    messages=replace(_COMPOSER.messages, reduced="", reduce_copies=(4 + 4, 4 + 6)),
    source="llm-foundry 0.0.4 on torch 1.13.1: as composer, with reductions in bf16 and without an early end of "
    "recomputation",
)
_TE_2024 = replace(
    _TE,
    name="te-2024",
    kernels=KernelForms(attention="cudnn of 2024", scales="delayed"),
    source="NeMo 24.09 to 24.12: as te, with the attention that cuDNN had then (Shah et al. 2407.08608, figures 5 and "
    "6), and scales of earlier steps, so that nothing looks for a largest magnitude and a norm writes codes",
)
_DEEPSPEED_2021 = replace(
    _MEGATRON_2021,
    name="deepspeed-2021",
    kernels=replace(_MEGATRON_2021.kernels, dropout=False),
    source="Megatron-DeepSpeed of 2021 and 2022: Megatron-LM's layers and messages of that time, without dropout",
)

SOFTWARE: Mapping[str, Software] = {
    each.name: each
    for each in (
        *(OWN, _MEGATRON, _TE, _FSDP2, _DEEPSPEED, _NANOTRON),
        *(_MEGATRON_2021, _MEGATRON_2022, _TE_2024, _DEEPSPEED_2021, _COMPOSER, _COMPOSER_OLD),
    )
}
NAMED = ("own", "megatron", "te", "fsdp2", "deepspeed", "nanotron")


def software_named(name: str) -> Software:
    """A software of the table. Raises `ClusterError` for a name that it does not have."""
    if name not in SOFTWARE:
        raise ClusterError(f"software {name!r} is not described{did_you_mean(name, SOFTWARE)}")
    return SOFTWARE[name]


def run_by(cluster: Cluster, software: Software) -> Cluster:
    """The cluster as `software` runs on it. Raises `ClusterError` on a CPU: all but this runtime run on GPUs."""
    device = cluster.device
    if device.software != OWN:
        raise ClusterError(f"cluster {cluster.name!r} is run by {device.software.name} already: start from it as it is")
    if software == OWN:
        return cluster
    if device.type == "cpu":
        raise ClusterError(
            f"software {software.name!r} is described on GPUs, and device.backend of cluster {cluster.name!r} is "
            "'cpu': leave it out, or give a cluster of GPUs"
        )
    kernels = _attending(device, software.kernels.attention)
    return replace(cluster, device=replace(device, software=software, kernels=kernels))


# Flash attention in Triton, which version 2 beats 1.3 to 1.5 times forward and 2 times backward (Dao 2307.08691,
# section 4.1).
_TRITON = 1.4, 2.0


def _cudnn_of_2024(kernels: Kernels) -> Kernels:
    # Causal, 539 TFLOP/s of 989 forward with heads of 128 and 388 with 64 at 16k keys, 315 and 225 at 512; backward 516
    # and 433, not causal, times the 0.906 that a mask costs forward (Shah et al. 2407.08608, figures 5 and 6).
    return replace(
        kernels, attention=0.545, attention_backward=0.473, attention_half_keys=300.0, attention_half_keys_backward=0.0
    )


def _attending(device: Device, attention: str) -> Kernels:
    """Kernels with another attention. A device without `flash2` attends with flash attention 2 already."""
    kernels = device.kernels
    if attention == "cudnn of 2024":
        return _cudnn_of_2024(kernels) if "H100" in device.name else kernels
    if attention not in ("flash2", "triton"):
        return kernels
    if kernels.flash2:
        kernels = replace(
            kernels,
            attention=kernels.flash2,
            attention_backward=kernels.flash2_backward or kernels.flash2,
            attention_half_head=16.0,  # as in the preset `dgx-a100`, which attends with this version
            attention_half_keys=300.0,
            attention_half_keys_backward=0.0,
        )
    if attention == "flash2":
        return kernels
    forward, backward = kernels.attention, kernels.attention_backward or kernels.attention
    return replace(kernels, attention=forward / _TRITON[0], attention_backward=backward / _TRITON[1])
