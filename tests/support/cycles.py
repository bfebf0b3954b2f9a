"""Steps of two islands, and outer loops, to predict."""

import random
from dataclasses import replace
from typing import Literal

from terrace.cluster.cluster import Cluster
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.simulate.step import Step
from tests.support.toys import MODELS, SEQUENCE, cluster_of

MODEL = MODELS["deep llama tied"]
FLOPS = tuple(1e9 * (1 + block % 3) for block in range(len(MODEL.declared)))


def islands(rate: float = 1.0, *, backend: Literal["cpu", "cuda"] = "cpu", penalty: float = 0.0) -> Cluster:
    """Two islands of four ranks, with a link between them that is `rate` times as fast as the others."""
    found = cluster_of(2, 2, 2)
    device = replace(found.device, backend=backend, overlap_penalty=penalty)
    tiers = [replace(each, overlap_penalty=None) for each in found.tiers]
    last = replace(tiers[-1], bandwidth_bytes_per_s=rate * tiers[-1].bandwidth_bytes_per_s)
    return replace(found, device=device, tiers=(*tiers[:-1], last))


def step_of(cluster: Cluster, outer: Outer, name: str = "zero3", num_micros: int = 2, **changes: object) -> Step:
    made = preset(name, cluster)
    inside = {state: "node" for state in ("params", "grads", "optimizer") if getattr(made, state) == "system"}
    plan = replace(made, outer=outer, **inside, **changes)  # type: ignore[arg-type]
    return of_plan(cluster, plan, num_micros)


def of_plan(cluster: Cluster, plan: Plan, num_micros: int = 2) -> Step:
    return Step(cluster=cluster, plan=plan, blocks=MODEL.declared, num_micros=num_micros, sequence=SEQUENCE, work=FLOPS)


def loops(seed: int) -> Outer:
    draw = random.Random(seed)
    fragments = draw.choice((1, 1, 2, 3))
    every = fragments * draw.choice((1, 2, 5, 9))
    delay = draw.choice((0, 1, every // 2, every))
    optimizer = draw.choice(("nesterov", "momentum", "average"))
    return Outer(tier="system", every=every, fragments=fragments, delay=min(delay, every), optimizer=optimizer)  # type: ignore[arg-type]
