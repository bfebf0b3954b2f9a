"""The lab's links: those of the cluster preset `lab`, and links in the proportion of a model on Frontier; no torch.

A proportion is the seconds in which a rank computes a micro-batch, and the seconds in which it gathers all parameters
once in bf16, tier by tier. On Frontier they are Terrace's predictions: kernels and links of the preset `frontier`, 48
nodes, the 20 B GPT of arXiv 2501.04266 with one sequence of 2,048 tokens. Here the seconds of a micro-batch are
measured (the contestant `compute`, all ranks at once), and the rates of the tiers follow from them and from the bytes
of this model. Latencies stay those of the kernel.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from bench.lab.job import BF16_BYTES, Job
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.lab.rehearse.wiring import FASTEST_BYTES_PER_S
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.presets import preset
from terrace.program.instruction import Op
from terrace.program.lowering import build_stages
from terrace.simulate.cost import step_costs
from terrace.simulate.links import hop_s
from terrace.simulate.work import Work

PRESET = "lab"
LAB, FRONTIER, LOOPBACK = "lab", "frontier", "none"
NODES, SEQUENCE = 48, 2048


@dataclass(frozen=True, kw_only=True)
class Proportion:
    """Seconds of a micro-batch's forward and backward, and of a gather of all parameters by tier, innermost first."""

    num_params: int
    compute_s: float
    gather_s: Mapping[str, float]
    gather_bytes: Mapping[str, int]  # that a rank sends

    def shares(self) -> dict[str, float]:
        """Seconds of the gather on each tier over those of the micro-batch."""
        return {tier: seconds / self.compute_s for tier, seconds in self.gather_s.items()}


def gpt_20b() -> ModelConfig:
    """32 layers of hidden 7168 and 56 heads: 20 B parameters."""
    sizes = {"vocab_size": 51200, "n_embd": 7168, "n_layer": 32, "n_head": 56, "n_positions": SEQUENCE}
    without_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return parse_model({"model_type": "gpt2", **sizes, **without_dropout})


def on_frontier() -> Proportion:
    """The proportion of the 20 B model on 384 GCDs of Frontier."""
    cluster, model = load_cluster("frontier").resized(NODES), gpt_20b()
    # One device's own clock: the lab's ranks, which share cores, are not spread as devices are.
    cluster = replace(cluster, device=replace(cluster.device, spread=0.0))
    plan = replace(preset("zero3", cluster), compute="bf16", micro_batch=1)
    (program,) = build_stages(cluster, plan, block_specs(model), 1, SEQUENCE)
    costs = step_costs(program, Work(layer=layer_operations(model), sequence=SEQUENCE, micro_batch=1))
    seconds = dict.fromkeys((tier.name for tier in cluster.tiers), 0.0)
    sent = dict.fromkeys(seconds, 0)
    for instruction in program.instructions:
        if instruction.op is Op.GATHER and not instruction.backward:
            for hop in program.message(instruction).hops:
                name = cluster.tiers[hop.tier].name
                seconds[name] += hop_s(cluster, hop.tier, hop.degree, hop.sent_bytes)
                sent[name] += hop.sent_bytes
    compute_s = sum(costs.forward_s) + sum(costs.backward_s)
    return Proportion(num_params=num_params(model), compute_s=compute_s, gather_s=seconds, gather_bytes=sent)


def preset_rates() -> dict[str, float]:
    """Bytes/s of one rank over each tier of the preset."""
    return {tier.name: tier.bandwidth_bytes_per_s for tier in _cluster().tiers}


def rates_in_proportion(wanted: Proportion, micro_batch_s: float, size: int, job: Job) -> dict[str, float]:
    """Bytes/s of one rank over each tier for a model of `size` parameters whose micro-batch takes `micro_batch_s`."""
    shares = wanted.shares()
    return {tier: sent / (shares[tier] * micro_batch_s) for tier, sent in gather_bytes(BF16_BYTES * size, job).items()}


def gather_bytes(model_bytes: float, job: Job) -> dict[str, float]:
    """Bytes that a rank sends over each tier to gather `model_bytes`, which all ranks share."""
    found, held = {}, model_bytes
    for tier, degree in job.tiers.items():
        held /= degree
        found[tier] = (degree - 1) * held
    return found


def overrides(rates: Mapping[str, float]) -> list[str]:
    """The words after `--cluster lab` that give its tiers these rates."""
    return [f"--cluster.tiers.{tier}.bandwidth_bytes_per_s={rate:.6g}" for tier, rate in rates.items()]


def rate_words(rates: Mapping[str, float], scale: float) -> str:
    """The links in words: rates of the links that ranks share, in Mbit/s."""
    cluster, found, free = _cluster(), [], []
    for index, tier in enumerate(cluster.tiers):
        rate = rates[tier.name] * scale
        if rate >= FASTEST_BYTES_PER_S:
            free.append(tier.name)
            continue
        below = cluster.tiers[index - 1].name if index else "rank"
        shared_by = cluster.ranks_within(index - 1) if tier.shared else 1
        owner = below if tier.shared else "rank"
        found.append(f"a {owner}'s link into the {tier.name} {8e-6 * rate * shared_by:.0f} Mbit/s")
    words = "; ".join(found)
    return words + (f"; not limited: {', '.join(free)}" if free else "")


def _cluster() -> Cluster:
    return load_cluster(PRESET)
