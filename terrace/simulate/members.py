"""The predicted step of one member of the outermost tier, where members differ (`Plan.shares`).

Members only meet in messages that all send once a step. While the slowest computes, the others are ahead and wait for
it there, so its step, played as if all members were like it, is the step of all (`predict_step`).
"""

from dataclasses import replace

from terrace.plan.members import member_cases, stage_clusters
from terrace.plan.wire import MessageClass
from terrace.simulate.noting import WAIT_OUTER
from terrace.simulate.step import Prediction, Step, predict_alike, predict_step

_WAIT_SYNC = f"wait {MessageClass.SYNC.value}"


def member_step(step: Step, member: int = 0) -> Step:
    """The step of a member of the outermost tier, as if all were like it; the step of all in a pipeline of members."""
    if stage_clusters(step.cluster, step.plan):
        return step
    cluster, num_micros = member_cases(step.cluster, step.plan, step.num_micros)[member]
    if (cluster, num_micros) == (step.cluster, step.num_micros):
        return step
    return replace(step, cluster=cluster, num_micros=num_micros)


def predict_member(step: Step, member: int = 0) -> Prediction:
    """The step of a member, which waits for the slowest where it meets the others.

    Raises `PlanError` for a plan that cannot run.
    """
    slowest = predict_step(step)
    own_step = member_step(step, member)
    if own_step is step or (own_step.cluster, own_step.num_micros) == (slowest.step.cluster, slowest.step.num_micros):
        return slowest
    own = predict_alike(own_step)
    category = WAIT_OUTER if step.plan.outer.has_islands else _WAIT_SYNC
    rest_s = slowest.step_s - own.step_s
    times_s = tuple({**times, category: times.get(category, 0.0) + rest_s} for times in own.times_s)
    return replace(own, times_s=times_s)
