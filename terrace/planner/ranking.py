"""Ranking of estimates: faster first, simpler first among practically equal ones.

A prediction is not exact to a thousandth, so differences below `TIE` are insignificant. The fastest plan and all plans
within `TIE` of it are one group; the fastest of the rest leads the next group. Within a group the simpler comes first:
less recomputation, then less memory, then fewer axes, then sort order. (Comparing pairs would not be transitive: of
three plans, each may be within a thousandth of the next, but the first not of the last.)
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from terrace.plan.plan import AXES
from terrace.planner.task import Candidate

TIE = 1e-3


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a plan on a rank of its busiest stage; memory is that of the stage that needs most.

    `time_s` sums to `step_s`.
    """

    num_micros: int
    step_s: float
    time_s: Mapping[str, float]
    memory_bytes: Mapping[str, int]

    @property
    def needed_bytes(self) -> int:
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, kw_only=True)
class Estimate(Cost):
    """Cost of a candidate. Only `Evaluator.played` fills in bytes, the split of blocks and further choices."""

    candidate: Candidate
    sent_bytes: Mapping[tuple[str, str], int] = field(default_factory=dict)  # by (message, tier)
    stages: tuple[int, ...] = ()  # blocks of every virtual stage
    chosen: Mapping[str, Any] = field(default_factory=dict)  # keys that its plan leaves out and its step has

    @property
    def simplicity(self) -> tuple[int, int, int, Candidate]:
        """Sort key of equally fast plans: less recomputation, less memory, fewer axes first."""
        num_axes = sum(self.candidate.mesh.total(axis) > 1 for axis in AXES)
        return self.candidate.recompute, self.needed_bytes, num_axes, self.candidate


def ranked(estimates: Iterable[Estimate]) -> list[Estimate]:
    found = []
    for group in _groups(sorted(estimates, key=lambda each: each.step_s)):
        found += sorted(group, key=lambda each: each.simplicity)
    return found


class Window(NamedTuple):
    """Limits on estimates that can enter the `count` best.

    No candidate slower than `end_s` can enter, and none slower than `leader_s` that recomputes more than `worst`, or as
    much with more memory.
    """

    leader_s: float = math.inf
    end_s: float = math.inf
    worst: tuple[float, float] = (math.inf, math.inf)


def window(estimates: Sequence[Estimate], count: int) -> Window:
    """Window of estimates in ascending order of time; unbounded while there are fewer than `count`."""
    left = count
    for group in _groups(estimates):
        if left <= len(group):
            # The last rank is within this group: anything simpler than its holder may still displace it.
            worst = sorted(each.simplicity for each in group)[left - 1]
            return Window(group[0].step_s, _end_s(group[0]), worst[:2])
        left -= len(group)
    return Window()


def _groups(estimates: Sequence[Estimate]) -> Iterable[Sequence[Estimate]]:
    first = 0
    for index, estimate in enumerate(estimates):
        if estimate.step_s > _end_s(estimates[first]):
            yield estimates[first:index]
            first = index
    if estimates:
        yield estimates[first:]


def _end_s(leader: Estimate) -> float:
    return leader.step_s * (1 + TIE)
