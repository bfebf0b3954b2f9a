"""Describe a cluster that you do not have yet, find the fastest plan for a model on it, and read the result in Python.

    python -m examples.plan_cluster

Nothing is run and torch is not needed. `terrace plan` does the same on the command line, with reasons.
"""

from collections.abc import Mapping
from typing import NamedTuple

from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import num_params
from terrace.model.config import load_model
from terrace.plan.plan import Plan
from terrace.planner.pins import Pins
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.planner.ties import settle
from terrace.simulate.bands import Band, band_of

CLUSTER = Cluster(
    name="rented",
    # A preset's device has the shares of its peaks that kernels reach; without them a `Device` is priced at its peaks.
    device=load_cluster("dgx-a100").device,
    tiers=(  # innermost first; bandwidths are of one device, in one direction
        Tier(name="node", size=8, bandwidth_bytes_per_s=300e9, latency_s=6e-6),
        Tier(name="system", size=2, bandwidth_bytes_per_s=3.125e9, latency_s=10e-6),  # 25 GB/s for 8 devices
    ),
)


class Row(NamedTuple):
    """A plan and its predicted step; bytes are those of one rank."""

    plan: Plan  # a value, which `terrace.Trainer` takes as it is
    step_s: float
    band: Band  # the relative error of predictions for similar runs
    memory_bytes: int
    sent_bytes: Mapping[tuple[str, str], int]  # by message and tier


def best_plans(task: Task, count: int = 3) -> list[Row]:
    """The best plans, fastest first; among plans whose predictions tie, the simplest first."""
    # A narrow search takes a second: data and tensor axes, with at most 4 tensor ranks.
    space = Space(task=task, axes=("data", "tensor"), pins=Pins({"tensor": (1, 4)}))
    found, _ = find(space, count)
    rows = []
    for each in settle(task, found.best).best:
        plan = plan_of(task, each.candidate)
        rows.append(Row(plan, each.step_s, band_of(task.cluster, plan), each.needed_bytes, each.sent_bytes))
    return rows


if __name__ == "__main__":
    task = Task(model=load_model("docs/gpt-350m.json"), cluster=CLUSTER, batch=64, sequence=1024)
    print(f"{num_params(task.model) / 1e6:.0f} M parameters on {task.cluster.world_size} devices")
    for row in best_plans(task):
        plan, tokens_per_s = row.plan, task.batch * task.sequence / row.step_s
        print(
            f"\n{row.step_s:.3f} s {row.band}, {tokens_per_s:,.0f} tokens/s, {row.memory_bytes / 1e9:.1f} GB a device"
        )
        print(f"  params on {plan.params}, grads on {plan.grads}, optimizer on {plan.optimizer}")
        print(f"  axes {plan.mapping or 'data alone'}, micro-batch {plan.micro_batch}")
        for (message, tier), sent in row.sent_bytes.items():
            print(f"  {message:16} {tier:8} {sent / 1e6:9.1f} MB")
