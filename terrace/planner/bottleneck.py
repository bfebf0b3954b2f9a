"""Detects a plan that mostly waits on one tier, and searches for a faster plan.

Both plans are predicted as in `terrace plan`, on the same cluster, so their ratio is meaningful.
"""

from dataclasses import dataclass

from terrace.plan.plan import Plan
from terrace.planner.evaluate import step_of
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task
from terrace.simulate.critical import exposed_by_tier
from terrace.simulate.stages import record_stages
from terrace.simulate.step import predict_step

MOST = 0.5  # share of the step from which on a tier is a bottleneck
LEAST_GAIN = 1.1  # times as fast a plan must be to be worth naming; predictions are off by some percents


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The tier with the longest exposed communication, its share of the step, and the step in seconds."""

    tier: str
    share: float
    step_s: float

    @property
    def is_most(self) -> bool:
        """Whether waiting on this tier takes most of the step."""
        return self.share > MOST


def bottleneck(task: Task, plan: Plan) -> Bottleneck:
    """The tier on which the busiest stage waits longest. Raises `PlanError` for a plan that cannot run."""
    predicted = predict_step(step_of(task, plan))
    recordings, stage = record_stages(predicted.programs, predicted.costs), predicted.busiest
    exposed = exposed_by_tier(recordings, stage)
    step_s = recordings[stage].report.step_s
    if predicted.cycle is not None:  # recorded is a step without exchanges
        outer = predicted.cycle.outer
        exposed[outer.tier] = exposed.get(outer.tier, 0.0) + predicted.cycle.waited_s / outer.every
        step_s = predicted.step_s
    tier = max(exposed, key=exposed.__getitem__, default=task.cluster.tiers[-1].name)
    share = exposed.get(tier, 0.0) / (step_s or 1.0)
    return Bottleneck(tier=tier, share=share, step_s=predicted.step_s)


def better_plan(task: Task, step_s: float, limit: int) -> Estimate | None:
    """The best plan found within `limit` simulations, if it beats a step of `step_s` by `LEAST_GAIN`."""
    found, _ = find(Space(task=task), count=1, limit=limit)
    return found.best[0] if found.best and step_s / found.best[0].step_s >= LEAST_GAIN else None


def waits_outside(task: Task, plan: Plan, estimate: Estimate) -> bool:
    """Whether most of a step (`estimate`) waits for the outermost tier, and its members divide the batch.

    Most plans wait too little, which is decided without playing them.
    """
    last = task.cluster.tiers[-1]
    waits_s = sum(spent for name, spent in estimate.time_s.items() if name.startswith("wait "))
    if last.size == 1 or task.batch % last.size or waits_s <= MOST * estimate.step_s:
        return False
    found = bottleneck(task, plan)
    return found.is_most and found.tier == last.name
