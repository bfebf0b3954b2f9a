"""The gain of `balance = "cost"` beside the gains that Zeppelin (2509.21841) publishes over an even ring."""

import statistics
from dataclasses import replace

from bench.models import llama_of
from bench.validation.rows import Row, Table, markdown_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.lab.policies.costs import policy_costs
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.distributions import batches, sample
from terrace.simulate.attention_cost import attention_cost
from terrace.simulate.layers import core_rounds, optimizer_s, seconds_of
from terrace.simulate.links import ring_s
from terrace.simulate.work import Work

_TOKENS = 4096  # a GPU
_BATCHES = 4
_GPUS = (32, 64, 128)
# Layers, hidden size, heads, inner size of the MLP: OpenLLaMA's 3B, and Touvron et al. 2302.13971, table 2.
_MODELS = {"3B": (26, 3200, 32, 8640), "7B": (32, 4096, 32, 11008), "13B": (40, 5120, 40, 13824)}
_PUBLISHED = (("mean", 2.80), ("largest", 6.60))  # of Zeppelin, over all its models, clusters and data sets

_PARAM_BYTES, _GRAD_BYTES = 2, 4  # of the distributed optimizer of Megatron-LM, whose gradients are fp32

_TEXT = """
Seconds of a step under an even ring over all GPUs (every document cut over all of them, as Transformer Engine's context
parallelism does) over those under `balance = "cost"`. Nodes are like those of the paper with A800: eight A100 whose
NVLink carries 200 GB/s each way and which share four adapters of 200 Gb/s (the one GPU of a node that sends in a flat
ring has one to itself); 4,096 tokens a GPU; document lengths from the published histogram of
terrace/sequence/distributions.py, means over four batches.

Both sides count what is the same under both, of one micro-batch: the products, norms and launches of a layer, kernel by
kernel; embedding and head; the optimizer on a shard; gradients in fp32 and parameters in bf16 once around all GPUs.
Attention reaches the share of its peak that kernels do on rows as short as the documents, or as their parts in a round.

The gain was three times the published one while only the layer was counted: this row taught that what is the same under
both contestants belongs into a gain, and that parts of a few tokens hardly use the device. What is left is the data:
the paper's documents are longer (arXiv, GitHub, ProLong64k, whose histograms are not published). Here 71 % are of at
most 1,024 tokens, where an even ring is at its worst: all keys go over an adapter in every round, and hardly any
attention hides them. So this says that the gain is of the same kind and not how large it is; the limits guard against
change. Nothing was fitted. With documents of GitHub and of arXiv, and by numbers of GPUs: docs/context.md.
"""


def nodes(num_gpus: int, adapter_bytes_per_s: float) -> Cluster:
    """Nodes of eight A100 with the links of A800 nodes, and a GPU's share of the adapters."""
    cluster = load_cluster("dgx-a100").resized(num_gpus // 8)
    node, system = cluster.tiers
    tiers = (replace(node, bandwidth_bytes_per_s=200e9), replace(system, bandwidth_bytes_per_s=adapter_bytes_per_s))
    return replace(cluster, name="a800", tiers=tiers)


def llama(name: str) -> ModelConfig:
    """Return LLaMA 3B, 7B or 13B."""
    layers, hidden, heads, inner = _MODELS[name]
    return llama_of(hidden, layers, heads, heads, inner, vocab=32000)


def gains(model: str, num_gpus: int) -> list[float]:
    """Return the gain over an even ring of each batch."""
    # Of a flat ring one GPU of a node sends to the next node, and has an adapter to itself.
    clusters = {"even ring": nodes(num_gpus, 25e9), "cost": nodes(num_gpus, 4 * 25e9 / 8)}
    config = llama(model)
    dense_s, once_s = same_seconds(clusters["cost"], config)
    costs = {
        policy: replace(attention_cost(cluster, block_specs(config)), token_s=dense_s / _TOKENS)
        for policy, cluster in clusters.items()
    }
    degrees, found = [tier.size for tier in clusters["cost"].tiers], []
    for lengths in batches(_TOKENS * num_gpus, _BATCHES, sample(4096)):
        capacity = ring_rank_capacity(lengths, num_gpus, _TOKENS)
        seconds = {
            policy: {each.policy: each.layer_s for each in policy_costs(lengths, degrees, cost, capacity)}[policy]
            for policy, cost in costs.items()
        }
        steps = [config.num_layers * seconds[policy] + once_s for policy in ("even ring", "cost")]
        found.append(steps[0] / steps[1])
    return found


def same_seconds(cluster: Cluster, model: ModelConfig) -> tuple[float, float]:
    """Seconds of a step under both: of a layer without attention, and of all else once."""
    work, specs, device = Work(layer=layer_operations(model), sequence=_TOKENS), block_specs(model), cluster.device
    seconds = {block: seconds_of(device, work, specs[block]) for block in (0, 1, model.num_blocks - 1)}
    passes_s = {block: each.forward_s + each.backward_s for block, each in seconds.items()}
    attention_s = sum(core_rounds(device, work)[0])
    group = tuple(tier.size for tier in cluster.tiers)
    messages_s = ring_s(cluster, group, (_PARAM_BYTES + _GRAD_BYTES) * num_params(model))
    ends_s = passes_s[0] + passes_s[model.num_blocks - 1]
    return passes_s[1] - attention_s, ends_s + messages_s + optimizer_s(device, num_params(model) / cluster.world_size)


def table() -> Table:
    """Return the modelled gains beside the published ones."""
    found = {(model, number): gains(model, number) for model in _MODELS for number in _GPUS}
    every = [gain for each in found.values() for gain in each]
    modelled = {"mean": statistics.fmean(every), "largest": max(every)}
    body = [
        (f"LLaMA {model}", *(f"{statistics.fmean(found[model, number]):.2f}" for number in _GPUS)) for model in _MODELS
    ]
    return Table(
        title="Zeppelin, gain of balancing by cost",
        text=_TEXT.strip() + "\n\n" + markdown_table(("model", *(f"{number} GPUs" for number in _GPUS)), body),
        heads=("gain over an even ring",),
        unit="times",
        rows=[Row(cells=(name,), published=published, modelled=modelled[name]) for name, published in _PUBLISHED],
        mean_limit=1.15,
        max_limit=1.5,
    )
