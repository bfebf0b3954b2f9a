"""A published step as a step to predict: the plan that its source names, on a preset of its machine.

A row of a file in `data/` names its model, its machine and its plan in the columns of `FIELDS`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from bench.models import llama_of
from bench.validation.rows import gpt
from terrace.cluster.cluster import Cluster, Device
from terrace.cluster.named_software import run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.cluster.software import OWN
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, model_flops
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.as_software import run_as
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step

Line = Mapping[str, str]

# How often a layer is computed again, by a row's column `recompute`. `every 2` stands for the selective forms of
# torchtitan: every second layer, or every second matrix product.
_AGAIN: Mapping[str, tuple[str, ...]] = {
    "none": (),
    "layers": ("layers.*",),
    "every 2": ("layers.* every 2",),
    "attention": ("layers.*: attention",),
}


def step_of(line: Line, software: str = OWN.name) -> Step:
    """The step of a row, priced as this runtime would run it, or as another software does."""
    cluster, model = run_by(cluster_of(line), software_named(software)), models()[line["model"]]
    tensor, context, pipeline, chunks = (int(line[name]) for name in ("tensor", "context", "pipeline", "chunks"))
    micro_batch, sequence = int(line["micro_batch"]), int(line["sequence"])
    data = int(line["gpus"]) // (tensor * context * pipeline)
    degrees = {"tensor": tensor, "context": context, "data": data, "pipeline": pipeline}
    plan = replace(
        preset(line["sharding"], cluster),
        mapping=mapping_of(cluster, degrees),
        compute="bf16",
        micro_batch=micro_batch,
        sequence_parallel=tensor > 1,
        recompute=_AGAIN[line["recompute"]],
        schedule=_schedule(pipeline, chunks),
        products=None if line["precision"] == "bf16" else line["precision"],
    )
    plan = run_as(cluster, plan)
    return _step(cluster, plan, model, int(line["batch"]) // (data * micro_batch), sequence)


def _step(cluster: Cluster, plan: Plan, model: ModelConfig, num_micros: int, sequence: int) -> Step:
    return Step(
        cluster=cluster,
        plan=plan,
        blocks=block_specs(model),
        num_micros=num_micros,
        sequence=sequence,
        work=work_of(cluster, plan, layer_operations(model), sequence),
    )


def _schedule(pipeline: int, chunks: int) -> str | None:
    if pipeline == 1:
        return None
    return "1f1b" if chunks == 1 else f"interleaved:{chunks}"


def published_s(line: Line) -> float:
    """Seconds of the published step. Rates of FLOPs are of the model's, with the whole square of attention."""
    value, gpus, batch, sequence = float(line["value"]), *(int(line[name]) for name in ("gpus", "batch", "sequence"))
    if line["unit"] == "step_s":
        return value
    if line["unit"] == "tokens_s_gpu":
        return batch * sequence / gpus / value
    if line["unit"] == "mfu_percent":
        value *= cluster_of(line).device.peak_flops_per_s["bf16"] / 1e14
    return model_flops(models()[line["model"]], sequence, batch) / gpus / (value * 1e12)


def mapping_of(cluster: Cluster, degrees: Mapping[str, int]) -> dict[str, dict[str, int]]:
    """Axes from the inside outwards, in Megatron's order of ranks."""
    left, mapping = dict(degrees), {}
    for tier in cluster.tiers:
        room, own = tier.size, {}
        for axis, degree in left.items():
            here = math.gcd(degree, room)
            if here > 1:
                own[axis], left[axis], room = here, degree // here, room // here
        mapping[tier.name] = own
    return {tier: own for tier, own in mapping.items() if own}


def cluster_of(line: Line) -> Cluster:
    """The machine of a row: a preset with the nodes and links that the source states."""
    whole, gpus, node = load_cluster(_PRESETS.get(line["preset"], line["preset"])), int(line["gpus"]), int(line["node"])
    inner, outer = whole.tiers[0], whole.tiers[-1]
    if line["link_gb_per_s"]:
        outer = replace(outer, bandwidth_bytes_per_s=1e9 * float(line["link_gb_per_s"]))
    tiers = (replace(inner, size=min(node, gpus)), replace(outer, size=max(1, gpus // node)))
    return replace(whole, device=_device(line["preset"], whole.device), tiers=tiers[: 1 + (gpus > node)])


_PRESETS = {"h100-96gb": "dgx-h100", "a100-40gb": "dgx-a100"}


def _device(name: str, device: Device) -> Device:
    """A device that differs from its preset in what the source states."""
    if name == "h100-96gb":  # HBM2e of 2.4 TB/s at 500 W: torchtitan, benchmarks/llama3_h100_202412_torchtitan.md
        return replace(device, memory_bytes=100e9, memory_bandwidth_bytes_per_s=2.4e12, power_watts=500)
    if name == "a100-40gb":
        other = load_cluster("perlmutter").device
        bandwidth = other.memory_bandwidth_bytes_per_s
        return replace(device, memory_bytes=other.memory_bytes, memory_bandwidth_bytes_per_s=bandwidth)
    return device


@cache
def models() -> Mapping[str, ModelConfig]:
    """The models of all rows, by name."""
    return {
        # Hagemann et al. 2311.05610: LLaMA's sizes with 128,000 words.
        "LLaMA 13B": _llama(5120, 40, 40, 40, 13824, 128000),
        "LLaMA 30B": _llama(6656, 60, 52, 52, 17920, 128000),
        "LLaMA 65B": _llama(8192, 80, 64, 64, 22016, 128000),
        "Llama 2 7B": _llama(4096, 32, 32, 32, 11008, 32000),
        "Llama 2 13B": _llama(5120, 40, 40, 40, 13824, 32000),
        "Llama 2 34B": _llama(8192, 48, 64, 8, 22016, 32000),
        "Llama 2 70B": _llama(8192, 80, 64, 8, 28672, 32000),
        "Llama 3 8B": _llama(4096, 32, 32, 8, 14336, 128256),
        "Llama 3 13B": _llama(5120, 40, 40, 8, 17920, 128256),  # KempnerForge's
        "Llama 3 70B": _llama(8192, 80, 64, 8, 28672, 128256),
        "Llama 3 405B": _llama(16384, 126, 128, 8, 53248, 128256),
        "dense 175B": _llama(12288, 96, 96, 8, 39680, 128256),  # KempnerForge's
        "GPT 175B": gpt(96, 12288, 96, 2048, 51200),
        "GPT 530B": gpt(105, 20480, 128, 2048, 51200),
        "GPT 1T": gpt(128, 25600, 160, 2048, 51200),
        "GPT-NeoX 20B": _neox(6144, 44, 64, 50432),
    }


def _neox(hidden: int, layers: int, heads: int, vocab: int) -> ModelConfig:
    """Untied, rotary on a quarter of a head, attention beside the MLP: configs/20B.yml of EleutherAI/gpt-neox."""
    return parse_model(
        {
            "model_type": "gpt_neox",
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "vocab_size": vocab,
            "max_position_embeddings": 2048,
            "rotary_pct": 0.25,
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
        }
    )


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int) -> ModelConfig:
    sizes = {"max_position_embeddings": 8192, "tie_word_embeddings": False}
    return llama_of(hidden, layers, heads, kv_heads, inner, vocab, **sizes)
