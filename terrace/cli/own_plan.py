"""The user's plan that `terrace plan` compares with those it finds: `--plan FILE|NAME`, `--plan.key VALUE`, or both."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from terrace.base.errors import ConfigError, PlanError, TerraceError
from terrace.base.schema import merge
from terrace.base.words import seconds
from terrace.cli.task import with_formats
from terrace.plan.as_software import run_as
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.planner.evaluate import step_of
from terrace.planner.micro_and_unit import with_best_numbers
from terrace.planner.ranking import Cost
from terrace.planner.scaling import evaluate_plan
from terrace.planner.task import Task
from terrace.planner.verdicts import lack, size_words
from terrace.report.uncertainty import is_tie
from terrace.simulate.bands import band_of
from terrace.train.layers import section

DEFAULT = "three-level"  # the default plan of `terrace train`
_DTYPES = ("compute", "messages", "products", "master", "optimizer_states")


class OwnPlan(NamedTuple):
    """A plan given by the user, with its missing numbers filled in, and its cost."""

    plan: Plan
    cost: Cost

    def words(self, task: Task, best: Cost) -> str:
        """Time and memory of the user's plan compared with the best plan found."""
        plan, cost = self
        longer, device = 100 * (cost.step_s / best.step_s - 1), task.cluster.device
        compared = f"{abs(longer):.1f} % {'longer' if longer >= 0 else 'shorter'} than the best"
        numbers = f"micro-batch {plan.micro_batch} x {cost.num_micros}"
        compared += ", a tie" if is_tie(cost.step_s, best.step_s) else ""
        step = f"{seconds(cost.step_s)} {band_of(task.cluster, plan)}"
        words = f"your plan {plan.name}, {numbers}: step {step}, {compared}"
        if cost.needed_bytes > device.usable_bytes:
            return f"{words}; it does not fit: {lack(task, cost)}"
        needed, needed_by_best = (size_words(each.needed_bytes) for each in (cost, best))
        return f"{words}; needs {needed} of {device.room_words}, the best {needed_by_best}"


def own_plan(task: Task, name: str | None, keys: Any) -> OwnPlan:
    """The user's plan, priced for a task.

    `keys` is the table of `--plan.key VALUE`. Missing micro-batch and unit become the fastest that fit, as for a run;
    missing dtypes are the task's. Raises `PlanError` or `ConfigError` for a plan that cannot run.
    """
    if not isinstance(keys or {}, Mapping):
        raise ConfigError(f"--plan.{keys!r}: set a key of the plan, as --plan.key VALUE")
    table = merge(section("plan", name or DEFAULT), keys or {})
    try:
        plan = run_as(task.cluster, command_plan(table, task.cluster))
        plan = replace(plan, **{dtype: getattr(task, dtype) for dtype in _DTYPES if dtype not in table})
        there = with_formats(task, plan)
        free = [number for number in ("micro_batch", "unit") if number not in table]
        plan = with_best_numbers(step_of(there, plan), free).plan if free else plan
        return OwnPlan(plan, evaluate_plan(there, plan))
    except TerraceError as error:
        raise PlanError(f"--plan {name or DEFAULT}: {error}") from error
