"""Finalists of a search that predictions cannot separate, and their order.

The search ranks by predicted seconds. Two plans of one search share most of their errors, so they are compared by their
relative error (`terrace.simulate.bands.tie_share`), which is smaller than the error of a step. Finalists within it of
the fastest tie. Among them comes first:

1. the plan that sends the fewest bytes across the slowest tier: predictions depend on these bytes most, and other jobs
   disturb them; amounts within `AS_FEW` of the fewest are equal;
2. of those, the plan that uses the least of a device beyond `FULL` of its memory, where allocators free and try again
   and predicted peaks miss by as much; uses within `AS_FULL` of the memory are equal;
3. then the plan with the fewest axes, then the fewest keys that no preset has;
4. then the faster.

Only the `FINALISTS` best of a search are considered, and the first of those that leave a fifth of the device
(terrace.planner.headroom), so the first plan does not depend on how many are shown. Further plans keep their order. A
plan that is slower by more than `tie_share` never comes before the fastest.
"""

from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.plan import AXES, SEARCHED
from terrace.plan.presets import PRESETS
from terrace.plan.search_limits import FINALISTS
from terrace.planner.ranking import Estimate
from terrace.planner.task import Task, plan_of
from terrace.simulate.bands import tie_share
from terrace.simulate.links import rate_bytes_per_s

AS_FEW = 0.05
# Shares of a device's memory. Published peaks are up to 18 % above predicted ones, so that a plan which leaves a fifth
# fits surely, and steps whose predicted peak is above 0.8 are slower than others of their sources (planner/robust.py).
FULL, AS_FULL = 0.8, 0.05


class Regret(NamedTuple):
    """The largest regret of a plan, as a share of the step, and the scenario of it (terrace.planner.robust)."""

    share: float
    scenario: str


# Why one plan comes before another, in the order of the rules.
RULES = (
    "sends fewer bytes across the slowest tier",
    "leaves more memory",
    "has fewer axes",
    "has fewer keys that no preset has",
)


class Ties(NamedTuple):
    """Estimates, with the `num_tied` finalists that tie with the fastest first, in the order of the rule."""

    best: tuple[Estimate, ...]
    num_tied: int
    tier: str | None  # the slowest; None where nothing is sent
    by: str = ""  # the rule by which the first is not the fastest; "" where it is
    regrets: tuple[Regret, ...] = ()  # of `best`, if it is in their order (terrace.planner.robust)

    @property
    def may_be_more(self) -> bool:
        return self.num_tied == len(self.best) >= FINALISTS

    @property
    def fastest(self) -> int:
        return min(range(len(self.best)), key=lambda place: self.best[place].step_s)


def settle(task: Task, estimates: Sequence[Estimate], others: Sequence[Estimate] = ()) -> Ties:
    """Settle the ties among a task's best plans, given in the order of their search; there is at least one.

    `others` are finalists that another search of the task has found.
    """
    finalists, further = (*estimates[:FINALISTS], *others), estimates[FINALISTS:]
    tier, end_s = slowest_tier(task), (1 + tie_share()) * min(each.step_s for each in finalists)
    tied, slower = _divided(finalists, end_s)
    fewest = min(crossing_bytes(each, tier) for each in tied)
    lean = [each for each in tied if crossing_bytes(each, tier) <= (1 + AS_FEW) * fewest]
    emptiest = min(beyond_full(task, each) for each in lean)

    def place(each: Estimate) -> tuple[float, ...]:
        sent, beyond = crossing_bytes(each, tier), beyond_full(task, each)
        few = 0 if sent <= (1 + AS_FEW) * fewest else sent
        return few, 0 if beyond <= emptiest + AS_FULL else beyond, *_complexity(task, each), each.step_s

    more, others = _divided(further, end_s)
    settled = sorted(tied, key=place)
    fastest = min((*settled, *more), key=lambda each: each.step_s)
    asked = zip(RULES, place(settled[0]), place(fastest), strict=False)  # without the step, which is the last
    by = next((rule if one < other else "" for rule, one, other in asked if one != other), "")
    return Ties(best=(*settled, *more, *slower, *others), num_tied=len(tied) + len(more), tier=tier, by=by)


def beyond_full(task: Task, estimate: Estimate) -> float:
    """Share of a device's memory that a plan uses beyond `FULL` of it."""
    return max(0.0, estimate.needed_bytes / task.cluster.device.memory_bytes - FULL)


def _divided(estimates: Sequence[Estimate], end_s: float) -> tuple[list[Estimate], list[Estimate]]:
    return [each for each in estimates if each.step_s <= end_s], [each for each in estimates if each.step_s > end_s]


def slowest_tier(task: Task) -> str | None:
    """Tier with several members and the lowest rate per device; among equals the outermost."""
    joining = [index for index, tier in enumerate(task.cluster.tiers) if tier.size > 1]
    slowest = min(reversed(joining), key=lambda index: rate_bytes_per_s(task.cluster, index, 0), default=None)
    return None if slowest is None else task.cluster.tiers[slowest].name


def crossing_bytes(estimate: Estimate, tier: str | None) -> int:
    return sum(size for (_, crossed), size in estimate.sent_bytes.items() if crossed == tier)


def _complexity(task: Task, estimate: Estimate) -> tuple[int, int]:
    plan = plan_of(task, estimate.candidate)
    presets = [build(task.cluster) for build in PRESETS.values()]
    own = min(sum(getattr(plan, key) != getattr(preset, key) for key in SEARCHED) for preset in presets)
    return sum(estimate.candidate.mesh.total(axis) > 1 for axis in AXES), own
