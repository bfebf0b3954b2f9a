"""MPT models trained with PyTorch FSDP on A100 and H100: published rows of throughput.

A row is preset `zero3` as Composer ran it (terrace.cluster.named_software): rows with FSDP's mixed precision `DEFAULT`
ran llm-foundry 0.3.0 on a nightly build of torch 2.1 of 2023-08-27, and rows with `PURE` 0.0.4 on torch 1.13.1 (the
defaults of their `submit_benchmarks.py`). The image is the column `Image` of their `h100new.md` at commit beb8dee6922c,
where the figures are the same ones. The rows on 128 and more H100 are in neither file; they came later, so version 2.1
is assumed. The parameter counts show GPT blocks with biases, learned positions and tied embeddings.

What is not priced has no published cost: the data loader, callbacks, the walk over all modules that switches them to
evaluation for the metrics, an allocator that is short of memory.
"""

from dataclasses import replace

from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, model_flops, num_params
from terrace.model.config import ModelConfig
from terrace.plan.as_software import run_as
from terrace.plan.presets import preset
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step

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
_SOFTWARE = {"DEFAULT": "composer", "PURE": "composer-2023"}  # by the mixed precision of a row

_A100_TEXT = """
Seconds of a training step of FULL_SHARD FSDP in bf16, from the published model FLOPs utilization. Preset `dgx-a100`
(for 40 GB devices with their memory bandwidth). The rows are priced as `composer` and `composer-2023` run them, whose
costs are from their source (`terrace/cluster/named_software.py`):

- Flash attention in Triton, for which their script asks and which version 2 beats 1.3 to 1.5 times forward and 2 times
  backward (Dao 2307.08691, section 4.1); its gradients are joined for one product.
- Messages along one ring over all devices. The first gathers and the last reductions of a micro-batch have nothing
  beside them.
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
recomputed and of -4 % where layers are, which is not explained.
"""

_H100_TEXT = """
As above, with preset `dgx-h100` and version 2 of flash attention as it was measured there (Shah et al. 2407.08608).
The bias was -26 % while one share of the peak stood for all kernels of attention, gradients cost nothing but their
messages, and messages nothing but their links: these rows taught that all three matter, and no constant was taken from
them. It is -6 % where nothing is recomputed and -8 % where layers are, most of all for the largest models on many
devices. A part of the second is that recomputation ends early, which the software of these rows has (pull request 96866
of torch, their column `Image`).

Rows of long sequences, whose time is attention's, are within 4 %, so it is the products and what surrounds them that
took longer there. NVIDIA's steps in bf16 of a year later, below, have no bias with the same share of products, so
libraries are the likelier cause: these rows are of 2023, when those for this device were young: in torch with cuBLAS
12.0, products of 2,048 rows reached 743 TFLOP/s and those of more rows 543 to 550 (issue 100850 of torch). No price is
taken from that: not all products of these rows were as slow.

Of the 3 to 8 % that rows of one model lose from 128 to 512 devices, the model has 1 %, and 4 of 8 where nothing is
recomputed: the slowest clock of more devices, more steps of a ring, and less of a fabric beyond a scalable unit. Nearly
all messages of these rows are hidden, so that width shows only in what hidden messages cost. The rest is not explained.
No published jitter could be taken for it without fitting: a study of stragglers counts what jobs lose by them (Lin et
al. 2505.05713), not how much a healthy rank's step varies; and up to 14 % of variation among GPUs in products (Golden
et al. 2510.15596) is the spread of clocks that the presets already have.
"""


def tables(every: int = 1) -> list[Table]:
    """Return each `every`-th published row with its modelled step, by kind of device."""
    return [
        _table("MosaicML, MPT with FSDP on A100", _A100_TEXT, "a100", every, mean_limit=0.06, max_limit=0.30),
        _table("MosaicML, MPT with FSDP on H100", _H100_TEXT, "h100", every, mean_limit=0.075, max_limit=0.30),
    ]


def _table(title: str, text: str, device: str, every: int, mean_limit: float, max_limit: float) -> Table:
    rows = []
    for line in read_rows("mosaicml_fsdp.csv", every):
        if not line["device"].startswith(device):
            continue
        step, parts = step_of(line)
        model, batch = model_of(line), int(line["global_batch"])
        flops_per_s = (
            float(line["mfu_percent"]) / 100 * step.cluster.device.peak_flops_per_s["bf16"] * int(line["num_gpus"])
        )
        cells = [line[name] for name in ("device", "model", "sequence", "num_gpus", "micro_batch")]
        rows.append(
            Row(
                cells=(*cells, "yes" if step.plan.recompute else "no"),
                published=counted_flops(model, step.sequence, batch) / flops_per_s,
                modelled=parts * predict_step(step).step_s,
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


def step_of(line: dict[str, str]) -> tuple[Step, float]:
    """The step of a published row in whole micro-batches, and the published step over it: its last may be smaller."""
    software, micro_batch = software_named(_SOFTWARE[line["mixed_precision"]]), int(line["micro_batch"])
    cluster = run_by(_cluster(line["device"], int(line["num_gpus"])), software)
    model, sequence = model_of(line), int(line["sequence"])
    plan = replace(
        preset("zero3", cluster),
        compute="bf16",
        micro_batch=micro_batch,
        recompute=("layers.*",) if line["checkpointing"] == "true" else (),
    )
    plan = run_as(cluster, plan)
    micros = int(line["global_batch"]) / cluster.world_size / micro_batch
    whole = max(1, round(micros))
    work = work_of(cluster, plan, layer_operations(model), sequence)
    blocks = block_specs(model)
    step = Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=whole, sequence=sequence, work=work)
    return step, micros / whole


def model_of(line: dict[str, str]) -> ModelConfig:
    """Return the model of a published row."""
    return gpt(*SHAPES[line["model"]], int(line["sequence"]), VOCAB)


def _cluster(name: str, num_devices: int) -> Cluster:
    cluster = load_cluster("dgx-h100" if name.startswith("h100") else "dgx-a100").resized(num_devices // _NODE_SIZE)
    if name != "a100_40gb":
        return cluster
    other = load_cluster("perlmutter").device
    bandwidth = other.memory_bandwidth_bytes_per_s
    device = replace(cluster.device, memory_bytes=other.memory_bytes, memory_bandwidth_bytes_per_s=bandwidth)
    return replace(cluster, device=device)
