"""Predicted curves: the same plan on more and more members of the outermost tier.

Strong scaling keeps the global batch, weak scaling the sequences per device. A size where the plan cannot run (the
batch does not divide, memory lacks) has no estimate but a reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from terrace.base.errors import PlanError, TerraceError
from terrace.cluster import Tier
from terrace.plan import AXES, Plan, num_micro_batches, validate
from terrace.planner.bound import Bounds
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.explain import lack, placement_of
from terrace.planner.space import shape_of
from terrace.planner.stages import SERIAL
from terrace.planner.task import Choice, Row, Task

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class Point:
    """One size of the cluster: `task` is what it does there; without an estimate, `reason` says what is in the way."""

    num_outermost: int
    task: Task
    estimate: Estimate | None = None
    reason: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all devices; 0 without an estimate."""
        return self.task.batch * self.task.sequence / self.estimate.step_s if self.estimate else 0.0

    @property
    def per_device(self) -> float:
        """Tokens a second of one device."""
        return self.tokens_per_s / self.task.cluster.world_size

    def cost_per_million(self, price_per_hour: float) -> float:
        """Return the price of a million tokens at a price per device and hour."""
        return price_per_hour / 3600 * 1e6 / self.per_device


def sizes_up_to(largest: int) -> list[int]:
    """Return 1, 2, 4 ... and the largest itself."""
    return sorted({*(1 << power for power in range(largest.bit_length())), largest})


def curve(task: Task, plan: Plan, sizes: Sequence[int], scaling: Scaling) -> list[Point]:
    """Return a point for every size of the outermost tier; `task` is that of its own size.

    Raises `PlanError` for a plan whose recomputation or prefetch the evaluation has no word for.
    """
    return [_point(task, plan, size, scaling) for size in sizes]


def choice_of(task: Task, plan: Plan) -> Choice:
    """Return a plan of data and tensor axes as a choice; raises `PlanError` where the planner has no such choice."""
    if plan.recompute not in ((), ("layers.*",)):
        raise PlanError(
            f"recompute = {list(plan.recompute)}: plans are priced with recompute = [] or ['layers.*']; use one of them"
        )
    if plan.prefetch != 1:
        raise PlanError(f"prefetch = {plan.prefetch}: plans are priced with prefetch = 1; leave it out")
    rows = tuple(_row(plan, tier) for tier in task.cluster.tiers)
    if not plan.sequence_parallel and shape_of(rows).tensor > shape_of(rows).columns:
        raise PlanError("sequence_parallel = false: plans are priced with sequence_parallel = true; leave it out")
    again = int(bool(plan.recompute))
    return Choice(again, plan.unit, SERIAL, 1, plan.micro_batch, placement_of(task, plan), rows)


def _row(plan: Plan, tier: Tier) -> Row:
    data, tensor, context, pipeline = (plan.degree(tier.name, axis, tier.size) for axis in AXES)
    columns = plan.degree(tier.name, "columns", tier.size)
    return (data, tensor, context, pipeline, columns) if columns > 1 else (data, tensor, context, pipeline)


def evaluate_plan(task: Task, plan: Plan) -> Estimate:
    """Return what a plan costs on the cluster of a task; raises `PlanError` for one that cannot run there."""
    layout = validate(task.cluster, plan, task.blocks)
    micros = num_micro_batches(plan, layout, task.batch)
    if micros % plan.unit:
        raise PlanError(f"unit = {plan.unit} does not divide the {micros} micro-batches of a rank: use a divisor")
    own = replace(task, wire=plan.wire, compute=plan.compute, master=plan.master)
    return Evaluator(Bounds(Estimator(own))).evaluate(choice_of(own, plan))


def _point(task: Task, plan: Plan, size: int, scaling: Scaling) -> Point:
    full = task.cluster.tiers[-1].size
    cluster = task.cluster.resized(size)
    if scaling == "weak" and task.batch * size % full:
        return Point(
            num_outermost=size, task=replace(task, cluster=cluster), reason="its share of the batch is no whole number"
        )
    there = replace(task, cluster=cluster, batch=task.batch * size // full if scaling == "weak" else task.batch)
    try:
        estimate = evaluate_plan(there, plan)
    except TerraceError as error:
        return Point(num_outermost=size, task=there, reason=str(error))
    if estimate.needed_bytes > cluster.device.memory_bytes:
        return Point(num_outermost=size, task=there, reason=lack(there, estimate))
    return Point(num_outermost=size, task=there, estimate=estimate)
