"""Runs of members with shares, and the same steps in one plain process on whole batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.plan.plan import Plan
from terrace.runtime.settings import OptimizerConfig
from tests.support.parity import ADAMW, Case, exact, flatten, make_adamw, trainable
from tests.support.shares import own_rows
from tests.support.toys import MODELS, WHOLE_ROWS, cluster_of, count_tokens, run_blocks

SGD = OptimizerConfig(name="sgd", lr=0.05, clip=0.5, weight_decay=0.0)
PAIRS, FOUR = cluster_of(2, 2), cluster_of(1, 4)  # two members of two ranks, four members of one
NUM_STEPS = 2
INSIDE = {"params": "package", "grads": "package", "optimizer": "package"}


def case_of(cluster: Cluster, name: str, shares: Sequence[int], settings: OptimizerConfig, **changes: object) -> Case:
    plan = replace(exact(name, cluster, **changes), shares=tuple(shares))
    return Case(plan, model="llama tied", optimizer=settings, batches=own_rows, num_steps=NUM_STEPS)


@cache
def alone(model_name: str, num_rows: int, name: str) -> tuple[list[float], list[float], Tensor]:
    """Losses, gradient norms and parameters of torch's optimizer on whole batches in this process."""
    model = MODELS[model_name]
    blocks = model.blocks(torch.float64)
    parameters = trainable(blocks)
    settings = {"adamw": ADAMW, "sgd": SGD}[name]
    optimizer = make_adamw(parameters) if name == "adamw" else torch.optim.SGD(parameters, lr=SGD.lr)
    losses, norms = list[float](), list[float]()
    for step in range(NUM_STEPS):
        batch = WHOLE_ROWS.batch(step, num_rows)
        optimizer.zero_grad()
        loss = model.objective(run_blocks(blocks, batch.inputs), batch.labels) / count_tokens(batch.labels)
        torch.autograd.backward(loss)
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, settings.clip)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, flatten(blocks)


def rows_of(cluster: Cluster, plan: Plan) -> int:
    return sum(plan.shares) * cluster.world_size // len(plan.shares) * plan.micro_batch


def unequal(*speeds: float) -> Cluster:
    cluster = cluster_of(1, len(speeds))
    *inner, tier = cluster.tiers
    return replace(cluster, tiers=(*inner, replace(tier, members=tuple(Member(speed=speed) for speed in speeds))))


def partitions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All shares of `total`, at least 1 each."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in partitions(total - first, parts - 1):
            yield (first, *rest)
