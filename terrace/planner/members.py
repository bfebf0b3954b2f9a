"""Shares of unequal members (terrace.cluster.members) for a plan that was found on the slowest of them.

A batch is dealt micro-batch by micro-batch, each to the member that would be done first with one more. As no member
gets faster by having more, the longest step is then the least there is (tests/planner/test_member_deals.py tries all).
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.layout import Layout
from terrace.plan.members import ranks_of_member, stage_clusters
from terrace.plan.plan import Plan
from terrace.plan.validate import validate
from terrace.planner.evaluate import step_of
from terrace.planner.member_stages import Formats, best_pipeline
from terrace.planner.ranking import Estimate
from terrace.planner.task import Task
from terrace.simulate.step import Prediction, Step, idle_s, predict_alike, predict_step

_MOST_MICROS = 16  # of a rank under equal shares, up to which a micro-batch is cut
_PLAYED = 8  # micro-batches up to which each number is played; beyond, steps grow by the same seconds
Seconds = Callable[[int], float]  # of a member's step, by its micro-batches


@dataclass(frozen=True, kw_only=True)
class Deal:
    """A plan with shares or, in a pipeline of members, stages; its step, and that of the plan with even ones.

    `waits_s` are of each member for the slowest, or of each stage for others.
    """

    task: Task
    plan: Plan
    estimate: Estimate
    prediction: Prediction
    even_s: float
    waits_s: tuple[float, ...]

    @property
    def gain(self) -> float:
        """Tokens of a second over those with equal shares."""
        return self.even_s / self.estimate.step_s


def slowest(cluster: Cluster, compute: str) -> Cluster:
    """The cluster if all members were like the one with the lowest peak in `compute`; itself if they are alike."""
    return min((alike for alike, _ in cluster.alike), key=lambda each: each.device.peak_flops_per_s.get(compute, 0.0))


def least_shares(total: int, seconds: Sequence[Seconds]) -> tuple[int, ...]:
    """Shares of `total` micro-batches, at least 1 each, with the least longest step; `seconds` by member.

    Raises `PlanError` for fewer micro-batches than members.
    """
    if total < len(seconds):
        raise PlanError(f"{total} micro-batches for {len(seconds)} members: each has at least 1")
    shares = [1] * len(seconds)
    ends = [(each(2), member) for member, each in enumerate(seconds)]
    heapq.heapify(ends)
    for _ in range(total - len(seconds)):
        _, member = ends[0]
        shares[member] += 1
        heapq.heapreplace(ends, (seconds[member](shares[member] + 1), member))
    return tuple(shares)


def deal(task: Task, plan: Plan, estimate: Estimate, formats: Formats = MappingProxyType({})) -> Deal:
    """`plan` with the best shares of the members of `task`'s cluster; `estimate` is of equal shares.

    Its micro-batch may be cut, so that shares come nearer to the members' speeds. A pipeline of members may use
    `formats` between them. Raises `PlanError` for a plan that cannot have shares.
    """
    if stage_clusters(task.cluster, plan):
        return _staged(task, plan, estimate, formats)
    even, deals = step_of(task, plan), list[Deal]()
    even_s, error = predict_step(even).step_s, PlanError("no micro-batch")
    for size in range(plan.micro_batch, 0, -1):
        if plan.micro_batch % size or (deals and even.num_micros * plan.micro_batch // size > _MOST_MICROS):
            continue
        try:
            deals.append(_dealt(task, replace(plan, micro_batch=size), estimate, even_s))
        except PlanError as wrong:
            error = wrong
    if not deals:
        raise error
    return min(deals, key=lambda each: each.estimate.step_s)


def _dealt(task: Task, plan: Plan, estimate: Estimate, even_s: float) -> Deal:
    step, layout = step_of(task, plan), Layout.of(task.cluster, plan)
    alone = replace(plan, shares=(1,) * task.cluster.tiers[-1].size)
    validate(task.cluster, alone, task.blocks)
    total = step.num_micros * layout.data_degree // ranks_of_member(alone, layout)
    seconds = _of_members(step)
    shared = replace(plan, shares=least_shares(total, seconds))
    validate(task.cluster, shared, task.blocks)
    found = predict_step(replace(step, plan=shared, num_micros=max(shared.shares)))
    own_s = [each(share) for each, share in zip(seconds, shared.shares, strict=True)]
    return Deal(
        task=task,
        plan=replace(found.step.plan, shares=shared.shares),
        estimate=_estimate(estimate, found, max(shared.shares)),
        prediction=found,
        even_s=even_s,
        waits_s=tuple(max(0.0, found.step_s - each) for each in own_s),
    )


def dealt_anew(step: Step) -> tuple[tuple[int, ...], float, float]:
    """The best shares of as many micro-batches as a step with shares has, on the members of its cluster.

    Returns these shares, and the predicted seconds of the step with its own shares and with these.
    """
    shares = least_shares(sum(step.plan.shares), _of_members(step))
    dealt = replace(step, plan=replace(step.plan, shares=shares), num_micros=max(shares))
    return shares, predict_step(step).step_s, predict_step(dealt).step_s


def _staged(task: Task, plan: Plan, estimate: Estimate, formats: Formats) -> Deal:
    """A pipeline of unequal members: their order, blocks by their speeds, formats by their links."""
    even = predict_step(step_of(task, plan))
    found = best_pipeline(task, plan, formats)
    return Deal(
        task=task,
        plan=found.step.plan,
        estimate=_estimate(estimate, found, found.step.num_micros),
        prediction=found,
        even_s=even.step_s,
        waits_s=tuple(map(idle_s, found.reports)),
    )


def _estimate(estimate: Estimate, found: Prediction, num_micros: int) -> Estimate:
    sent = max(found.expected_bytes, key=lambda each: sum(each.values()))
    return replace(
        estimate,
        num_micros=num_micros,
        step_s=found.step_s,
        time_s=found.times_s[found.busiest],
        sent_bytes={(message.value, tier): size for (message, tier), size in sent.items()},
        stages=found.step.plan.stages,
    )


def best_deal(
    task: Task, plans: Iterable[tuple[Plan, Estimate]], most_s: float, formats: Formats = MappingProxyType({})
) -> Deal | None:
    """The fastest of `plans` with their best shares; None if no step of them is shorter than `most_s`."""
    found: Deal | None = None
    for plan, estimate in plans:
        with suppress(PlanError):
            each = deal(task, plan, estimate, formats)
            if each.estimate.step_s < most_s:
                found, most_s = each, each.estimate.step_s
    return found


def _of_members(step: Step) -> list[Seconds]:
    by_cluster = {alike: _seconds(replace(step, cluster=alike)) for alike, _ in step.cluster.alike}
    return [by_cluster[alike] for alike, count in step.cluster.alike for _ in range(count)]


def _seconds(step: Step) -> Seconds:
    played: dict[int, float] = {}

    def exact(num_micros: int) -> float:
        if num_micros not in played:
            played[num_micros] = predict_alike(replace(step, num_micros=num_micros)).step_s
        return played[num_micros]

    def seconds(num_micros: int) -> float:
        if num_micros <= 2 * _PLAYED:
            return exact(num_micros)
        slope_s = (exact(2 * _PLAYED) - exact(_PLAYED)) / _PLAYED
        return exact(2 * _PLAYED) + slope_s * (num_micros - 2 * _PLAYED)

    return seconds
