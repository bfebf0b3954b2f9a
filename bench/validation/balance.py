"""The gain of `balance = "cost"` beside the gains that Zeppelin (2509.21841) publishes over an even ring."""

import statistics
from dataclasses import replace

from bench.validation.rows import Row, Table, markdown_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.config import ModelConfig, parse_model
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.distributions import batches, sample
from terrace.sequence.policies import policy_costs
from terrace.simulate.attention_cost import attention_cost

_TOKENS = 4096  # a GPU
_BATCHES = 4
_GPUS = (32, 64, 128)
# Layers, hidden size, heads, inner size of the MLP: OpenLLaMA's 3B, and Touvron et al. 2302.13971, table 2.
_MODELS = {"3B": (26, 3200, 32, 8640), "7B": (32, 4096, 32, 11008), "13B": (40, 5120, 40, 13824)}
_PUBLISHED = (("mean", 2.80), ("largest", 6.60))  # of Zeppelin, over all its models, clusters and data sets

_TEXT = """
One layer, forward and backward, and its share of embedding and head: the seconds under an even ring over all GPUs
(every document cut over all of them, as Transformer Engine's context parallelism does) over those under `balance =
"cost"`. Nodes are like those of the paper with A800: eight A100 whose NVLink carries 200 GB/s each way and which share
four adapters of 200 Gb/s (the one GPU of a node that sends in a flat ring has one to itself); 4,096 tokens a GPU;
document lengths from the published histogram of terrace/sequence/distributions.py, means over four batches.

The gain is about three times the published one. The paper's figures are of whole steps, on several clusters and on
other data, whose histograms are not published; here most documents are short, where an even ring is at its worst: all
keys go over an adapter in every round, and nothing but the attention of a round hides them. The model leaves out what
is the same under both (optimizer, gradients, launches) and how much less kernels reach on short documents, which makes
a gain smaller. So this says that the gain is of the same kind and not how large it is; the limits guard against
change. Nothing was fitted.
"""


def nodes(num_gpus: int, adapter_bytes_per_s: float) -> Cluster:
    """Return nodes of eight A100 with the links of A800 nodes, and what a GPU has of the adapters."""
    cluster = load_cluster("dgx-a100").resized(num_gpus // 8)
    node, system = cluster.tiers
    tiers = (replace(node, bandwidth_bytes_per_s=200e9), replace(system, bandwidth_bytes_per_s=adapter_bytes_per_s))
    return replace(cluster, name="a800", tiers=tiers)


def llama(name: str) -> ModelConfig:
    """Return LLaMA 3B, 7B or 13B."""
    layers, hidden, heads, inner = _MODELS[name]
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": 32000,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": inner,
        }
    )


def gains(model: str, num_gpus: int) -> list[float]:
    """Return the gain over an even ring of each batch."""
    # Of a flat ring one GPU of a node sends to the next node, and has an adapter to itself.
    clusters = {"even ring": nodes(num_gpus, 25e9), "cost": nodes(num_gpus, 4 * 25e9 / 8)}
    costs = {policy: attention_cost(cluster, llama(model)) for policy, cluster in clusters.items()}
    degrees, found = [tier.size for tier in clusters["cost"].tiers], []
    for lengths in batches(_TOKENS * num_gpus, _BATCHES, sample(4096)):
        capacity = ring_rank_capacity(lengths, num_gpus, _TOKENS)
        seconds = {
            policy: {each.policy: each.layer_s for each in policy_costs(lengths, degrees, cost, capacity)}[policy]
            for policy, cost in costs.items()
        }
        found.append(seconds["even ring"] / seconds["cost"])
    return found


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
        mean_limit=1.8,
        max_limit=2.2,
    )
