"""Where do the models of PPO go as a cluster grows? Predicted iterations by placement; needs no torch.

HybridFlow's setting (2409.19256, section 8.1): actor, reference, critic and reward of one size, Llama's, on nodes of
eight A100 of 80 GB with 200 Gb/s of a node between them; 1024 prompts of 1024 tokens with responses of 1024 tokens, in
8 updates of an epoch. Placements, each with the best allocation and plans:

- colocated: all on one pool;
- split: actor and reference on one, critic and reward on another;
- standalone: each model on a pool of its own;
- best: of all partitions.

`--launch` are the host's seconds to launch the kernels of a layer: the preset's figure for an engine that launches each
kernel, as Terrace's does, or 0 for one that has recorded them.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.models import llama_of
from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.config import ModelConfig
from terrace.rl.placement.dataflow import STAGES, Dataflow, ppo
from terrace.rl.placement.places import Places, Roles
from terrace.rl.placement.pools import partitions
from terrace.rl.placement.search import Placed, find_among

# Hidden size, layers, heads, heads of keys and values, inner size: Llama 2 (2307.09288), Code Llama 34B (2308.12950).
SIZES = {
    "7B": (4096, 32, 32, 32, 11008),
    "13B": (5120, 40, 40, 40, 13824),
    "34B": (8192, 48, 64, 8, 22016),
    "70B": (8192, 80, 64, 8, 28672),
}
GROUPS: dict[str, Sequence[Sequence[Roles]]] = {
    "colocated": [[(0, 1, 2, 3)]],
    "split": [[(0, 1), (2, 3)]],
    "standalone": [[(0,), (1,), (2,), (3,)]],
    "best": list(partitions(4)),
}
NODE_BYTES_PER_S = 25e9  # 200 Gb/s, shared by the devices of a node


@dataclass(frozen=True, kw_only=True)
class Row:
    """A model on a number of devices: the placement found for each way, None where it has no room."""

    model: str
    devices: int
    found: dict[str, Placed | None]


def llama(name: str) -> ModelConfig:
    """A model of the table."""
    hidden, layers, heads, kv_heads, inner = SIZES[name]
    return llama_of(hidden, layers, heads, kv_heads, inner, vocab=32000)


def cluster_of(devices: int, launch_s: float | None = None) -> Cluster:
    """Nodes of eight A100 with the paper's network; `launch_s` replaces the host's seconds for a layer."""
    whole = load_cluster("dgx-a100").resized(devices // 8)
    inner, outer = whole.tiers
    outer = replace(outer, bandwidth_bytes_per_s=NODE_BYTES_PER_S / inner.size, shared=True)
    kernels = whole.device.kernels
    kernels = kernels if launch_s is None else replace(kernels, host_layer_s=launch_s)
    return replace(whole, device=replace(whole.device, kernels=kernels), tiers=(inner, outer))


def flow_of(name: str) -> Dataflow:
    """PPO of four models of one size."""
    model = llama(name)
    return Dataflow(roles=ppo(model, model, model), prompts=1024, prompt_tokens=1024, response_tokens=1024, updates=8)


def row_of(name: str, devices: int, launch_s: float | None) -> Row:
    """Every way of a size on a number of devices."""
    places = Places(flow_of(name), cluster_of(devices, launch_s))
    found = dict[str, Placed | None]()
    for way, sets in GROUPS.items():
        try:
            found[way] = find_among(places, sets, 1).best[0]
        except PlanError:
            found[way] = None
    return Row(model=name, devices=devices, found=found)


def pools_words(placed: Placed) -> str:
    """Devices and roles of every pool."""
    pools = placed.placement.pools
    return "; ".join(f"{pool.devices}: {', '.join(role.name for role in pool.roles)}" for pool in pools)


def line(row: Row) -> str:
    """A row of the page."""
    seconds = [f"{placed.seconds:.1f}" if placed else "no room" for placed in row.found.values()]
    best = row.found["best"]
    stages = " + ".join(f"{value:.1f}" for value in best.report.stages.values()) if best else ""
    return f"| {row.model} | {row.devices} | {' | '.join(seconds)} | {stages} | {pools_words(best) if best else ''} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", choices=SIZES, default=list(SIZES))
    parser.add_argument("--devices", nargs="*", type=int, default=[16, 32, 64, 96, 128])
    parser.add_argument("--launch", type=float, help="seconds (default: the preset's)")
    options = parser.parse_args()
    stages = " + ".join(STAGES)
    print(f"| model | devices | colocated | split | standalone | best, s | {stages} | its pools |")
    print("|---|---|---|---|---|---|---|---|")
    for name in options.models:
        for devices in options.devices:
            print(line(row_of(name, devices, options.launch)), flush=True)


if __name__ == "__main__":
    main()
