"""MPT models trained with PyTorch FSDP on A100 and H100: published rows of throughput.

Every layer is gathered for its forward and for its backward, and its gradient is reduced, for each micro-batch; all
of it runs beside the computation, but for the first and the last message (`bench.validation.composer`). The optimizer
steps on a shard. The parameter counts show GPT blocks with biases, learned positions and tied embeddings.
"""

from dataclasses import dataclass, replace

from bench.validation.composer import OPTIMIZER_BYTES, SOFTWARE, Software, micro_batch_s
from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig
from terrace.simulate.kernels import memory_s
from terrace.simulate.layers import model_flops
from terrace.simulate.work import Work

VOCAB = 50368
SHAPES = {  # layers, hidden, heads: scripts/train/yamls/pretrain of mosaicml/llm-foundry
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_NODE_SIZE = 8
# Blocks of threads that NCCL keeps resident while it sends, each on a core that products then lack (NCCL, issue 1656):
# 24 for an all-gather inside a node (issue 1225 for an A100; NVIDIA's developer forum, thread 337991, for an H100), two
# for each of 8 adapters across nodes (issue 1041: twice the channels that its search finds; one an adapter is assumed).
_NODE_BLOCKS, _NIC_BLOCKS = 24, 16


@dataclass(frozen=True, kw_only=True)
class _Device:
    """How a device of the rows is described: a preset, and the rate of flash attention 2 on it."""

    preset: str
    forward: float
    backward: float
    memory_from: str | None = None  # a preset whose device has the memory


# The benchmark's script asks for flash attention in Triton (`attn_impl` in submit_benchmarks.py beside the tables),
# which flash attention 2 beats 1.3 to 1.5 times forward and 2 times backward (Dao 2307.08691, section 4.1).
_TRITON = {"forward": 1.4, "backward": 2.0}
_HALF_HEAD, _HALF_KEYS = 16.0, 300.0  # of flash attention 2, as in the preset `dgx-a100`

# Flash attention 2 at its best, causal, heads of 128: 73 % and 63 % on an A100 (Dao, section 4.1); on an H100 335
# TFLOP/s forward, and backward 322 without a mask, times the 0.905 that the mask costs forward (Shah et al. 2407.08608,
# figures 5 and 6).
_DEVICES = {
    "a100_80gb": _Device(preset="dgx-a100", forward=0.73, backward=0.63),
    "a100_40gb": _Device(preset="dgx-a100", forward=0.73, backward=0.63, memory_from="perlmutter"),
    "h100_80gb": _Device(preset="dgx-h100", forward=335 / 989.4, backward=322 * 0.905 / 989.4),
}

_A100_TEXT = """
Seconds of a training step of FULL_SHARD FSDP in bf16, from the published model FLOPs utilization. Preset `dgx-a100`
(for 40 GB devices with their memory bandwidth). The software of the rows is described from its source, not this
project's (`bench/validation/composer.py`, `bench/validation/fsdp.py`):

- Flash attention in Triton, for which their script asks and which version 2 beats 1.3 to 1.5 times forward and 2 times
  backward (Dao 2307.08691, section 4.1); its gradients are joined for one product.
- Messages along one ring over all devices, during which NCCL keeps cores to itself. The first gathers and the last
  reductions of a micro-batch have nothing beside them.
- Gradients that FSDP joins, casts and divides, 8 bytes a parameter and micro-batch, 18 where they are reduced in fp32;
  shards are cast for every gather, and their gradients divided and added.
- A fused loss, and two metrics of every batch that each compute the cross entropy of all logits again in fp32.
- An optimizer of one kernel an operation.
- The rows on 80 GB below 70b, and those on H100, ran on a nightly build of torch 2.1, whose recomputation ends before
  the last product of a layer; the others on 1.13.1, which recomputes all of it. Their authors measured the 30b under
  torch 2.0.1 too (`torches.md` beside `h100new.md`): there it is 6 to 7 % slower at up to 2,048 tokens.

The largest misses are rows whose neighbours fit: one sequence of 8192 tokens of the 30b, small sequences of the 760m,
13b on eight and 70b on 64 devices of 40 GB. In most of them memory is nearly full, and an allocator that frees and
tries again would explain it; the model knows nothing of that. What is left is a bias of +1 % where nothing is
recomputed and of -5 % where layers are, which is not explained.
"""

_H100_TEXT = """
As above, with preset `dgx-h100` and version 2 of flash attention as it was measured there (Shah et al. 2407.08608).
The bias was -26 % while one share of the peak stood for all kernels of attention, gradients cost nothing but their
messages, and messages nothing but their links: these rows taught that all three matter, and no constant was taken from
them. It is -5 % where nothing is recomputed and -7 % where layers are, most of all for the largest models on many
devices. Without the early end of recomputation the second would be -2 %; but the software of these rows has it (pull
request 96866 of torch, their column `Image`).

Rows of long sequences, whose time is attention's, are within 4 %, so it is the products and what surrounds them that
took longer there. NVIDIA's steps in bf16 of a year later, below, have no bias with the same share of products, so
libraries are the likelier cause: these rows are of 2023, when those for this device were young: in torch with cuBLAS
12.0, products of 2,048 rows reached 743 TFLOP/s and those of more rows 543 to 550 (issue 100850 of torch). No price is
taken from that: not all products of these rows were as slow.

Of the 3 to 8 % that rows of one model lose from 128 to 512 devices, the model has 1 %, and 3 of 8 where nothing is
recomputed: the slowest clock of more devices, more steps of a ring, and less of a fabric beyond a scalable unit. Nearly
all messages of these rows are hidden, so that width shows only in what hidden messages cost. The rest is not explained.
No published jitter could be taken for it without fitting: a study of stragglers counts what jobs lose by them (Lin et
al. 2505.05713), not how much a healthy rank's step varies; and up to 14 % of variation among GPUs in products (Golden
et al. 2510.15596) is the spread of clocks that the presets already have.
"""


def tables() -> list[Table]:
    """Return the published rows with modelled steps, by kind of device."""
    return [
        _table("MosaicML, MPT with FSDP on A100", _A100_TEXT, "a100", mean_limit=0.06, max_limit=0.30),
        _table("MosaicML, MPT with FSDP on H100", _H100_TEXT, "h100", mean_limit=0.075, max_limit=0.30),
    ]


def _table(title: str, text: str, device: str, mean_limit: float, max_limit: float) -> Table:
    rows = []
    for line in read_rows("mosaicml_fsdp.csv"):
        if not line["device"].startswith(device):
            continue
        num_devices, batch = int(line["num_gpus"]), int(line["global_batch"])
        model, work, cluster = model_of(line), work_of(line), _cluster(line["device"], num_devices)
        flops_per_s = float(line["mfu_percent"]) / 100 * cluster.device.peak_flops_per_s["bf16"] * num_devices
        cells = [line[name] for name in ("device", "model", "sequence", "num_gpus", "micro_batch")]
        rows.append(
            Row(
                cells=(*cells, "yes" if work.recompute == "full" else "no"),
                published=counted_flops(model, work.sequence, batch) / flops_per_s,
                modelled=step_s(cluster, model, work, batch, SOFTWARE[line["mixed_precision"]]),
            )
        )
    return Table(
        title=title,
        text=text,
        heads=("device", "model", "sequence", "GPUs", "micro-batch", "recompute"),
        unit="s",
        rows=rows,
        mean_limit=mean_limit,
        max_limit=max_limit,
    )


def counted_flops(model: ModelConfig, sequence: int, batch: int) -> int:
    """Return the FLOPs by which the rows are counted: as `model_flops`, with every parameter in a product.

    That adds the norms, the biases and the positions, 6 FLOPs a token for each.
    """
    in_products = sum(
        param.numel
        for block in block_specs(model)
        for param in block.params
        if len(param.shape) == 2 and param.name != "positions"
    )
    return model_flops(model, sequence, batch) + 6 * batch * sequence * (num_params(model) - in_products)


def step_s(cluster: Cluster, model: ModelConfig, work: Work, global_batch: int, software: Software) -> float:
    """Return the modelled seconds of a step of `global_batch` sequences."""
    num_devices = cluster.world_size
    num_micros = global_batch / num_devices / work.micro_batch  # a fraction: the last one may be smaller
    compute_s, beside_s, alone_s = micro_batch_s(cluster, block_specs(model), work, software, num_micros)
    blocks = _NODE_BLOCKS if num_devices <= _NODE_SIZE else _NIC_BLOCKS
    micro_s = overlapped_s(compute_s, beside_s, blocks / cluster.device.kernels.num_cores, alone_s)
    shard = num_params(model) / num_devices
    return num_micros * micro_s + memory_s(cluster.device, OPTIMIZER_BYTES * shard) + cluster.device.kernels.optimizer_s


def model_of(line: dict[str, str]) -> ModelConfig:
    """Return the model of a published row."""
    return gpt(*SHAPES[line["model"]], int(line["sequence"]), VOCAB)


def work_of(line: dict[str, str]) -> Work:
    """Return the work of a published row."""
    return Work(
        layer=layer_operations(model_of(line)),
        sequence=int(line["sequence"]),
        micro_batch=int(line["micro_batch"]),
        recompute="full" if line["checkpointing"] == "true" else "none",
    )


def _cluster(name: str, num_devices: int) -> Cluster:
    description = _DEVICES[name]
    cluster = load_cluster(description.preset).resized(num_devices // _NODE_SIZE)
    chip = cluster.device
    kernels = replace(
        chip.kernels,
        attention=description.forward / _TRITON["forward"],
        attention_backward=description.backward / _TRITON["backward"],
        attention_half_head=_HALF_HEAD,
        attention_half_keys=_HALF_KEYS,
        attention_half_keys_backward=0.0,
    )
    chip = replace(chip, kernels=kernels)
    if description.memory_from:
        other = load_cluster(description.memory_from).device
        chip = replace(
            chip,
            memory_bytes=other.memory_bytes,
            memory_bandwidth_bytes_per_s=other.memory_bandwidth_bytes_per_s,
        )
    return replace(cluster, device=chip)


def overlapped_s(compute_s: float, message_s: float, penalty: float, tail_s: float = 0.0) -> float:
    """Return the seconds of computation and messages side by side, where computing slows by `penalty` meanwhile.

    max(C (1 + penalty min(1, N / C)), N) + tail: never better than the longer of them, nor, with a penalty of at most
    1, worse than both in turn. Nothing can hide `tail_s`: a first gather, a last reduction.
    """
    return max(compute_s + penalty * min(compute_s, message_s), message_s) + tail_s
