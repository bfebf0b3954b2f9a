"""NVIDIA's runs of dense models with NeMo (Megatron-Core, Transformer Engine) on 8 to 2304 devices, in bf16 and in fp8.

A row is the plan that its recipe names, predicted as `te` runs it, and those of 2024 as `te-2024`
(terrace.cluster.named_software): tensor messages fused with the products beside them (`ub_tp_comm_overlap: true`), the
attention of that year, and Transformer Engine's products in fp8.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from bench.models import llama_of
from bench.validation.published import mapping_of
from bench.validation.rows import Row, Table, gpt, read_rows
from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.plan.as_software import run_as
from terrace.plan.presets import preset
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step

_HEADS = ("model", "system", "GPUs", "tensor", "context", "pipeline", "batch", "precision", "release")
_RACK = 16  # trays of a rack that these runs use: 64 of its 72 devices

_TEXT = """
Seconds of a step under weak scaling: the batch grows with the devices. From the recipes of NVIDIA's DGX Cloud
benchmarks, release 25.01 (NeMo 24.09 to 24.12). A row is the plan that its recipe names: tensor and context ranks
inside a node where they fit, data ranks in the rest of it, pipeline stages outermost, as many layers on each virtual
stage, or as many blocks, with embedding and logits for one each, where layers do not divide; optimizer states over the
data ranks; nothing recomputed. They are priced as `te-2024`, which fuses tensor messages with products, sends along
rings over whole groups, and has the attention that cuDNN had then. Not described: dropout of GPT-3, Nemotron's partial
RoPE and the kernels of its squared ReLU.

These rows taught two things. They were modelled 4.4 % too short in the mean, 0.8 to 10.5 % by model and width, while
the preset had a share of products between that of a moment and that of a step; it has now what a profile of single
kernels holds ([clusters.md](clusters.md#presets)). And a wide job of 2024 loses little: 1.5 to 2.7 % from the fewest
to the most devices of a plan, 4 to 128 times as many, where the model predicts 0.6 to 2.6 %. The 340B, with 16
micro-batches a step, loses 5.0 %; the model predicts 1.7 %.
"""

_FP8_TEXT = """
As above, with products of layers in 8 bits, one scale for a tensor. Transformer Engine quantises otherwise than this
project, and its way is stated: codes of weights are made once a step, those of a gradient and of its transpose by one
kernel. With scales of earlier steps (`fp8`) nothing looks for a largest magnitude, and a norm writes codes; with those
of the tensors as they are (`fp8-cs`, releases 25.11 and 26.02 of Megatron Bridge) it is found in a pass of its own. Not
described: gathers of tensor ranks in fp8, the host's time for the more and shorter kernels. What is missed is not
explained: the 70B by 7 to 10 %, and the 340B by 5 % on 128 devices and by 13 % on 2,048. Passes that this project makes
to quantise are in no row.
"""

_BLACKWELL_TEXT = """
As above, with the presets `gb200-nvl72` (64 devices of a rack are used) and `dgx-b200`. Of release 25.08 there are two
steps, the example of a later recipe. The 405B in bf16 is missed by 12 %, which is not explained. On these devices a
product takes operands in any order of dims, so that nothing is transposed.
"""


def tables(every: int = 1) -> list[Table]:
    """The rows on H100 in bf16, those in fp8, and those on Blackwell; of each, every `every`-th of the file."""
    lines = read_rows("nemo.csv", every)
    hopper = [line for line in lines if line["system"] == "dgx-h100"]
    return [
        _table("H100 in bf16", _TEXT, [line for line in hopper if line["precision"] == "bf16"], 0.03, 0.08),
        _table("H100 in fp8", _FP8_TEXT, [line for line in hopper if line["precision"] != "bf16"], 0.055, 0.14),
        _table("Blackwell", _BLACKWELL_TEXT, [line for line in lines if line["system"] != "dgx-h100"], 0.07, 0.14),
    ]


def _table(title: str, text: str, lines: Sequence[dict[str, str]], mean_limit: float, max_limit: float) -> Table:
    names = ("model", "system", "gpus", "tensor", "context", "pipeline", "batch", "precision", "release")
    rows = [
        Row(
            cells=tuple(line[name] for name in names),
            published=float(line["step_s"]),
            modelled=predict_step(run_of(line)).step_s,
        )
        for line in lines
    ]
    return Table(
        title=f"NVIDIA, dense models on {title}",
        text=text,
        heads=_HEADS,
        unit="s",
        rows=rows,
        mean_limit=mean_limit,
        max_limit=max_limit,
    )


def run_of(line: dict[str, str]) -> Step:
    """The step of a published row."""
    gpus, tensor, context, pipeline = (int(line[name]) for name in ("gpus", "tensor", "context", "pipeline"))
    micro_batch, batch, chunks = (int(line[name]) for name in ("micro_batch", "batch", "chunks"))
    model, sequence = _models()[line["model"]]
    software = software_named("te-2024" if line["release"] == "25.01" else "te")
    cluster, data = run_by(_cluster(line["system"], gpus), software), gpus // (tensor * context * pipeline)
    degrees = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
    plan = replace(
        preset("zero1", cluster),
        mapping=mapping_of(cluster, degrees),
        compute="bf16",
        micro_batch=micro_batch,
        sequence_parallel=tensor > 1,
        products=None if line["precision"] == "bf16" else "fp8",
    )
    plan = run_as(cluster, plan)
    if pipeline > 1:
        plan = replace(plan, schedule=f"interleaved:{chunks}", stages=_stages(model.num_layers, pipeline * chunks))
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=block_specs(model),
        num_micros=batch // (data * micro_batch),
        sequence=sequence,
        work=work_of(cluster, plan, layer_operations(model), sequence),
    )


def _stages(layers: int, virtual: int) -> tuple[int, ...]:
    """As many layers on each virtual stage; where they do not divide, embedding and logits count as one each."""
    if layers % virtual:
        return ((layers + 2) // virtual,) * virtual
    each = [layers // virtual] * virtual
    each[0], each[-1] = each[0] + 1, each[-1] + 1
    return tuple(each)


def _cluster(system: str, gpus: int) -> Cluster:
    whole = load_cluster(system)
    tiers = [replace(tier, size=_RACK if tier.name == "rack" else tier.size) for tier in whole.tiers]
    found, left = [], gpus
    for tier in tiers:
        # The outermost tier takes what is left.
        size = left if tier is tiers[-1] else min(tier.size, left)
        if size > 1:
            found.append(replace(tier, size=size))
        left //= size
    return replace(whole, tiers=tuple(found))


@cache
def _models() -> dict[str, tuple[ModelConfig, int]]:
    """Models and lengths of their sequences."""
    nemotron = _llama(6144, 32, 48, 24576, 256000), _llama(18432, 96, 96, 73728, 256000)
    small, large = (replace(each, gated_mlp=False, activation="relu") for each in nemotron)
    return {
        "Llama 3.1 8B": (_llama(4096, 32, 32, 14336), 8192),
        "Llama 3.1 70B": (_llama(8192, 80, 64, 28672), 8192),
        "Llama 3.1 405B": (_llama(16384, 126, 128, 53248), 8192),
        "GPT-3 175B": (gpt(96, 12288, 96, 2048, 51200), 2048),
        "Nemotron 4 15B": (small, 4096),
        "Nemotron 4 340B": (large, 4096),
    }


def _llama(hidden: int, layers: int, heads: int, inner: int, vocab: int = 128256) -> ModelConfig:
    return llama_of(hidden, layers, heads, 8, inner, vocab, max_position_embeddings=8192, tie_word_embeddings=False)
