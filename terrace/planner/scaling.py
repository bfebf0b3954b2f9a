"""Predicted scaling curves: one plan on a growing number of members of the outermost tier.

Strong scaling keeps the global batch, weak scaling the sequences per device. A size at which the plan cannot run (the
batch does not divide, memory is short) has a reason instead of an estimate.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

from terrace.base.errors import PlanError, TerraceError
from terrace.base.words import counted
from terrace.plan.as_software import reductions, run_as
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.planner.advice import cost_of
from terrace.planner.evaluate import step_of
from terrace.planner.explain import placement_of
from terrace.planner.pins import Pins
from terrace.planner.ranking import Cost
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Candidate, Task, plan_of
from terrace.planner.verdicts import Point, lack
from terrace.simulate.step import predict_step

Scaling = Literal["strong", "weak"]
PlanOf = Callable[[Task], Plan]  # raises the `TerraceError` of a task without one


def sizes_up_to(largest: int) -> list[int]:
    """Powers of two up to the largest size, and that size itself."""
    return sorted({*(1 << power for power in range(largest.bit_length())), largest})


def curve(
    task: Task, plan: Plan | PlanOf, sizes: Sequence[int], scaling: Scaling, devices: int | None = None
) -> list[Point]:
    """A point for each size of the outermost tier; the batch of `task` is for `devices`, by default its own.

    `plan` applies to all sizes, or is a function from the task of a size to its plan.
    """
    return [_point(task, plan, size, scaling, devices or task.cluster.world_size) for size in sizes]


def evaluate_plan(task: Task, plan: Plan) -> Cost:
    """Cost of a plan on the task's cluster. Raises `PlanError` if it cannot run there."""
    return cost_of(predict_step(step_of(task, plan)))


def preset_plan(name: str, task: Task) -> tuple[Plan, Candidate]:
    """A preset with the fastest micro-batch, unit and recomputation for a task.

    Raises `PlanError` if it cannot run there.
    """
    base = preset(name, task.cluster)
    own = replace(task, wire=reductions(task.cluster, base.wire))  # formats are part of a preset
    found, _ = find(Space(task=own, axes=("data",), pins=Pins(), placements=(placement_of(own, base),)), count=1)
    if found.best:
        candidate = found.best[0].candidate
        return plan_of(own, candidate, name=name), candidate
    ranks = counted(task.cluster.world_size, "rank")
    raise PlanError(
        lack(own, found.nearest) if found.nearest else f"a batch of {task.batch} does not divide over the {ranks}"
    )


def _point(task: Task, plan: Plan | PlanOf, size: int, scaling: Scaling, devices: int) -> Point:
    cluster = task.cluster.resized(size)
    share, rest = divmod(task.batch * cluster.world_size, devices)
    # Weak scaling keeps sequences per device, which may not be a whole number of sequences at this size.
    if scaling == "weak" and rest:
        return Point(
            num_outermost=size, task=replace(task, cluster=cluster), reason="its share of the batch is no whole number"
        )
    try:
        there = replace(task, cluster=cluster, batch=share if scaling == "weak" else task.batch)
    except TerraceError as error:  # a batch beyond those that are searched
        return Point(num_outermost=size, task=replace(task, cluster=cluster), reason=str(error))
    try:
        known = run_as(cluster, plan) if isinstance(plan, Plan) else plan(there)
        estimate = evaluate_plan(there, known)
    except TerraceError as error:
        return Point(num_outermost=size, task=there, reason=str(error))
    if estimate.needed_bytes > cluster.device.usable_bytes:
        return Point(num_outermost=size, task=there, reason=lack(there, estimate))
    return Point(num_outermost=size, task=there, estimate=estimate, plan=known)
