"""MPT models trained with PyTorch FSDP on A100: 139 published rows of throughput.

Every layer is gathered for its forward and for its backward, and its gradient is reduced, for each micro-batch; all
of it runs beside the computation, but for the first gather (`overlapped_s`). The optimizer steps on a shard.
The parameter counts show GPT blocks with biases, learned positions and tied embeddings.
"""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster import Cluster, load_cluster
from terrace.model.config import block_specs, num_params
from terrace.simulate.layers import block_seconds, model_flops, optimizer_s
from terrace.simulate.links import all_gather_s, overlapped_s, reduce_scatter_s
from terrace.simulate.work import Work

_VOCAB = 50368
_SHAPES = {  # layers, hidden, heads: scripts/train/yamls/pretrain of mosaicml/llm-foundry
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
_NODE_PENALTY, _NIC_PENALTY = 0.15, 0.02  # Calculon's a100_80g.json (Isaev et al., SC 2023)
_PARAM_BYTES = 2
_REDUCED_BYTES = {"DEFAULT": 4, "PURE": 2}
# The first flash attention, as these runs used: 25-40 % of the peak (Dao 2307.08691, section 1), the middle of it.
_ATTENTION = 0.325
_A100_40GB_BANDWIDTH = load_cluster("perlmutter").device.memory_bandwidth_bytes_per_s

_TEXT = """
Seconds of a training step of FULL_SHARD FSDP in bf16, from the published model FLOPs utilization. Preset `dgx-a100`
(for 40 GB devices with their memory bandwidth), its flash attention at 32.5 % of the peak: the first version, of these
runs, reaches 25-40 % (Dao 2307.08691, section 1). The largest misses are rows whose neighbours fit: one sequence of
8192 tokens of the 30b, small sequences of the 760m, 13b on eight and 70b on 64 devices of 40 GB fill the memory
nearly to the end, where an allocator that frees and retries costs time that the model does not know.
"""


def table() -> Table:
    """Return the published rows with modelled steps."""
    rows = []
    for line in read_rows("mosaicml_fsdp.csv"):
        num_devices, batch = int(line["num_gpus"]), int(line["global_batch"])
        work, cluster = _work(line), _cluster(line["device"], num_devices)
        flops_per_s = float(line["mfu_percent"]) / 100 * cluster.device.peak_flops_per_s["bf16"] * num_devices
        cells = [line[name] for name in ("device", "model", "sequence", "num_gpus", "micro_batch")]
        rows.append(
            Row(
                cells=(*cells, "yes" if work.recompute == "full" else "no"),
                published=counted_flops(work, batch) / flops_per_s,
                modelled=step_s(cluster, work, batch, _REDUCED_BYTES[line["mixed_precision"]]),
            )
        )
    return Table(
        title="MosaicML, MPT with FSDP",
        text=_TEXT,
        heads=("device", "model", "sequence", "GPUs", "micro-batch", "recompute"),
        unit="s",
        rows=rows,
        mean_limit=0.09,
        max_limit=0.36,
    )


def counted_flops(work: Work, batch: int) -> int:
    """Return the FLOPs by which the rows are counted: as `model_flops`, with every parameter in a product.

    That adds the norms, the biases and the positions, 6 FLOPs a token for each.
    """
    in_products = sum(
        param.numel
        for block in block_specs(work.model)
        for param in block.params
        if len(param.shape) == 2 and param.name != "positions"
    )
    return model_flops(work.model, work.sequence, batch) + 6 * batch * work.sequence * (
        num_params(work.model) - in_products
    )


def step_s(cluster: Cluster, work: Work, global_batch: int, reduced_bytes: int) -> float:
    """Return the modelled seconds of a step of `global_batch` sequences."""
    num_devices, last = cluster.world_size, work.model.num_blocks - 1
    group = tuple(tier.size for tier in cluster.tiers)
    specs = block_specs(work.model)
    compute_s = messages_s = 0.0
    for block, count in ((0, 1), (1, work.model.num_layers), (last, 1)):
        seconds = block_seconds(cluster.device, work, block)
        compute_s += count * (seconds.forward_s + seconds.backward_s)
        gathers = 1 if block == 0 else 2  # the tied matrix is gathered for the embedding, then held for the head
        params = specs[block].num_trainable
        messages_s += count * gathers * all_gather_s(cluster, group, _PARAM_BYTES * params)
        messages_s += count * reduce_scatter_s(cluster, group, reduced_bytes * params)
    first_s = all_gather_s(cluster, group, _PARAM_BYTES * specs[0].num_trainable)
    penalty = _NODE_PENALTY if num_devices <= _NODE_SIZE else _NIC_PENALTY
    micro_s = overlapped_s(compute_s, messages_s, penalty, first_s)
    num_micros = global_batch / num_devices / work.micro_batch  # a fraction: the last one may be smaller
    return num_micros * micro_s + optimizer_s(cluster.device, num_params(work.model) / num_devices)


def _work(line: dict[str, str]) -> Work:
    sequence = int(line["sequence"])
    model = gpt(*_SHAPES[line["model"]], sequence, _VOCAB)
    recompute = line["checkpointing"] == "true"
    return Work(
        model=model,
        sequence=sequence,
        micro_batch=int(line["micro_batch"]),
        recompute="full" if recompute else "none",
    )


def _cluster(device: str, num_devices: int) -> Cluster:
    cluster = load_cluster("dgx-a100").resized(num_devices // _NODE_SIZE)
    chip = replace(cluster.device, kernels=replace(cluster.device.kernels, attention=_ATTENTION))
    if device == "a100_40gb":
        chip = replace(chip, memory_bytes=40e9, memory_bandwidth_bytes_per_s=_A100_40GB_BANDWIDTH)
    return replace(cluster, device=chip)
