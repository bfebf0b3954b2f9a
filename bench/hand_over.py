"""Seconds of the hand-over from training to generation, beside two plainer ways. Predicted; needs no torch.

A model of 7B parameters (Llama 2's, 2307.09288) in bf16 goes from training layouts on 32 devices to replicas of tensor
ranks. The ways:

- dealt: slices go to the ranks that hold the most of them (terrace.rl.hand_over.dealing), moves as planned;
- neighbours: consecutive ranks are a replica, moves as planned (of HybridFlow's grouping the plain counterpart);
- whole: every rank gathers all parameters and then keeps its slice, as engines do that hand over whole tensors.

All three cross a slow tier once for each unit inside it, which a flat gather of all ranks would not.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from terrace.base.boxes import numel
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.program.lowering import build_stages
from terrace.rl.hand_over.seconds import HandOverCost, predict_hand_over
from terrace.rl.hand_over.transition import Transition

LLAMA_7B = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "hidden_act": "silu",
}  # fmt: skip
BYTES = 2  # of an element
PLANS = {
    "tensor 8": Plan(params="device", grads="device", optimizer="node", mapping={"node": {"tensor": 8}}),
    "tensor 8, 4 stages": Plan(
        params="device",
        grads="device",
        optimizer="device",
        mapping={"node": {"tensor": 8}, "system": {"pipeline": 4}},
        schedule="1f1b",
    ),
    "shards in nodes": Plan(params="node", grads="node", optimizer="system"),
    "shards over all": Plan(params="system", grads="system", optimizer="system"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One way from one training layout: its cost, and the most bytes of parameters that a rank has during it."""

    plan: str
    way: str
    cost: HandOverCost
    peak_bytes: int


def transition_of(cluster: Cluster, plan: Plan, blocks: tuple[BlockSpec, ...], rows: int) -> Transition:
    """The hand-over of a plan to replicas of `rows` tensor ranks."""
    programs = build_stages(cluster, plan, blocks, num_micros=4, sequence=2048)
    held = [program.stage.held for program in programs]
    return Transition.of(cluster, plan, blocks, programs[0].model.flats, held, rows)


def rows_of(cluster: Cluster, rows: int, names: Sequence[str]) -> Iterator[Row]:
    """Every way from every training layout of `names`."""
    blocks = block_specs(parse_model(LLAMA_7B))
    for name in names:
        plan = replace(PLANS[name], compute="bf16")
        dealt = transition_of(cluster, plan, blocks, rows)
        ranks = range(0, cluster.world_size, rows)
        neighbours = replace(dealt, replicas=tuple(tuple(range(first, first + rows)) for first in ranks))
        ways = {"dealt": dealt, "neighbours": neighbours, "whole": transition_of(cluster, plan, blocks, 1)}
        for way, transition in ways.items():
            cost = predict_hand_over(cluster, transition)
            yield Row(plan=name, way=way, cost=cost, peak_bytes=peak_bytes(transition))


def peak_bytes(transition: Transition) -> int:
    """The most bytes of parameters that a rank has: those it holds, and those of its slice that it receives."""
    totals = [0] * sum(map(len, transition.replicas))
    for first in dict.fromkeys(transition.alike):
        times = transition.alike.count(first)
        for rank, parts in enumerate(transition.holds[first]):
            totals[rank] += times * sum(numel(box) for boxes in parts.values() for box in boxes)
        for move in transition.moves(first):
            totals[move.target] += times * numel(move.box)
    return BYTES * max(totals)


def dgx() -> Cluster:
    """Four nodes of eight devices."""
    return load_cluster("dgx-a100").resized(4)


def line(row: Row) -> str:
    """A row of the page."""
    sent = " | ".join(f"{sent_bytes / 1e9:.1f}" for sent_bytes in row.cost.sent_bytes.values())
    received, peak = row.cost.received_bytes / 1e9, row.peak_bytes / 1e9
    return f"| {row.plan} | {row.way} | {sent} | {received:.2f} | {peak:.2f} | {row.cost.seconds:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2, help="tensor ranks of a replica (default 2)")
    parser.add_argument("--only", nargs="*", choices=PLANS, default=list(PLANS), help="these training layouts")
    options = parser.parse_args()
    cluster = dgx()
    tiers = [tier.name for tier in cluster.tiers]
    print("| training | way | " + " | ".join(f"GB over {tier}" for tier in tiers) + " | GB received | GB peak | s |")
    print("|---|---|" + "---|" * (len(tiers) + 3))
    for row in rows_of(cluster, options.rows, options.only):
        print(line(row))


if __name__ == "__main__":
    main()
