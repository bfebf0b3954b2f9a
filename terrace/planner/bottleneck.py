"""Whether a plan spends most of its step on one tier, and a plan that is predicted to be faster.

Both plans are evaluated as `terrace plan` does, on the same cluster, so that their ratio compares like with like.
"""

from collections import defaultdict
from dataclasses import dataclass

from terrace.plan import Plan
from terrace.planner.bound import Bounds
from terrace.planner.chosen import choice_of
from terrace.planner.estimate import Estimator, Part
from terrace.planner.evaluate import Estimate, Evaluator
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.staged import stage_steps
from terrace.planner.stages import SERIAL
from terrace.planner.task import Task, num_micros
from terrace.simulate import exposed_by_tier, record

MOST = 0.5  # share of the step from which on a tier is a bottleneck
LEAST_GAIN = 1.1  # times as fast a plan must be to be worth naming; predictions are off by some percents


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """The tier whose messages a step waits for longest, which share of the step that is, and the step's seconds."""

    tier: str
    share: float
    step_s: float

    @property
    def is_most(self) -> bool:
        """Whether that is most of the step."""
        return self.share > MOST


@dataclass(frozen=True, kw_only=True)
class Better:
    """A plan that is predicted to be faster, by what factor, and whether none of the searched space is faster."""

    estimate: Estimate
    gain: float
    proved: bool


def bottleneck(task: Task, plan: Plan) -> Bottleneck:
    """Return where a plan's step waits longest; raises `PlanError` for a plan that the planner cannot price."""
    choice, evaluator = choice_of(task, plan), Evaluator(Bounds(Estimator(task)))
    exposed: dict[str, float] = defaultdict(float)
    if choice.schedule == SERIAL:
        part = Part(True, (task.model.num_layers,), True)
        recording = record(*evaluator.program(part, choice, num_micros(task, choice)))
        exposed.update(exposed_by_tier([recording]))
        step_s = recording.report.step_s
    else:
        step = stage_steps(evaluator, choice)
        step_s = step.step_s
        for (_, tier), spent in step.exposed_s.items():
            exposed[tier] += spent
    tier = max(exposed, key=exposed.__getitem__, default=task.cluster.tiers[-1].name)
    return Bottleneck(tier=tier, share=exposed[tier] / (step_s or 1.0), step_s=step_s)


def better_plan(task: Task, step_s: float, limit: int) -> Better | None:
    """Return the best plan that `limit` simulations find, if it beats a step of `step_s` by `LEAST_GAIN`."""
    found, _ = find(Space(task=task), count=1, limit=limit)
    if not found.best or step_s / found.best[0].step_s < LEAST_GAIN:
        return None
    return Better(estimate=found.best[0], gain=step_s / found.best[0].step_s, proved=found.proved)
