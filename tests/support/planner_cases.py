"""Small tasks for tests of the planner."""

from dataclasses import replace
from typing import Any, Literal

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.lora.config import LoraConfig, with_adapters
from terrace.plan.mesh import Mesh
from terrace.planner.evaluate import Evaluator
from terrace.planner.space import Space
from terrace.planner.task import Task
from tests.support.mixtures import mixture

_GPT: dict[str, Any] = {"model_type": "gpt2", "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def gpt(layers: int, hidden: int, heads: int, *, vocab: int = 51200, positions: int = 2048, **more: Any) -> ModelConfig:
    """A GPT of this shape."""
    sizes = {"vocab_size": vocab, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": positions}
    return parse_model(_GPT | sizes | more)


SMALL = gpt(4, 512, 4, vocab=1000, positions=512)

MIXED = mixture(vocab_size=1000, hidden_size=512, intermediate_size=512)  # 8 experts, of which a token passes 2


def sized(name: str, *sizes: int, memory_bytes: float | None = None) -> Cluster:
    """A preset with other tier sizes, innermost first, and another memory, of which nothing is left free."""
    cluster = load_cluster(name)
    tiers = tuple(replace(tier, size=size) for tier, size in zip(cluster.tiers, sizes, strict=True))
    device = cluster.device
    device = device if memory_bytes is None else replace(device, memory_bytes=memory_bytes, headroom="0%")
    return replace(cluster, tiers=tiers, device=device)


def without_penalties(cluster: Cluster) -> Cluster:
    """A cluster whose messages slow no computing."""
    tiers = tuple(replace(tier, overlap_penalty=0.0) for tier in cluster.tiers)
    return replace(cluster, device=replace(cluster.device, overlap_penalty=0.0), tiers=tiers)


def small_task(cluster: Cluster, batch: int = 8, model: ModelConfig = SMALL) -> Task:
    """A task whose plans recompute whole layers or nothing."""
    return Task(model=model, cluster=cluster, batch=batch, sequence=256, operations=())


def adapted(task: Task, base: Literal["nf4"] | None = None) -> Task:
    """The task with adapters of attention alone to train, over a base in this format."""
    lora = LoraConfig(rank=4, targets=("layers.*.attention.*",), base=base)
    return replace(task, declared=with_adapters(block_specs(task.model), lora))


def long_13b() -> Space:
    """Plans of a 13B Llama with sequences of 8,192 on 64 A100 of 80 GB, which published runs fill."""
    model = {"model_type": "llama", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40}
    sizes = {"intermediate_size": 13824, "vocab_size": 128000, "max_position_embeddings": 8192}
    cluster = load_cluster("dgx-a100").resized(8)
    return Space(task=Task(model=parse_model(model | sizes), cluster=cluster, batch=512, sequence=8192))


def task_on(cluster: Cluster) -> Task:
    """16 sequences of 256 tokens of the small model."""
    return Task(model=SMALL, cluster=cluster, batch=16, sequence=256)


def evaluator_of(task: Task) -> Evaluator:
    return Evaluator(task)


CLUSTERS = {
    "frontier 2x2x2": sized("frontier", 2, 2, 2),
    "frontier 2x1x2": sized("frontier", 2, 1, 2),
    "dgx 4x2": sized("dgx-a100", 4, 2),
    "dgx 2x3": sized("dgx-a100", 2, 3),
    "ethernet 2x2": sized("ethernet", 2, 2),
    "lab 2x2x2": sized("lab", 2, 2, 2),
}


def mesh_of(*tiers: tuple[int, ...]) -> Mesh:
    """A mesh of (data, tensor, context, pipeline) of every tier; a fifth number are columns, a sixth Ulysses ranks."""
    found = []
    for data, tensor, context, pipeline, *factors in tiers:
        columns, ulysses = (*factors, *(1, 1)[len(factors) :])
        found.append((columns, tensor // columns, ulysses, context // ulysses, 1, data, pipeline))
    return Mesh(tuple(found))


def slow(rate: float, name: str = "dgx 4x2") -> Cluster:
    """One of `CLUSTERS` with an outermost link of `rate` bytes/s."""
    cluster = CLUSTERS[name]
    return replace(cluster, tiers=(*cluster.tiers[:-1], replace(cluster.tiers[-1], bandwidth_bytes_per_s=rate)))
