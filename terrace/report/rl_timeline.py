"""Timeline of the role calls in one iteration of `terrace rl`, one lane per pool and role, from `calls.jsonl`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from terrace.base.fitting import fitting
from terrace.base.printable import escape
from terrace.report.bars import Interval
from terrace.report.folder_parts import steady
from terrace.report.palette import ROLES
from terrace.report.svg import Row
from terrace.report.timeline import TimelineChart
from terrace.rl.call_lines import RoleCall

_MAX_BARS = 1000
_LANE_HEIGHT, _GAP, _HEADING = 24, 8, 22
_COLOURS = {"update": "updates", "give": "hand_over", "take": "hand_over"}  # methods by the name of their colour


@dataclass(frozen=True, kw_only=True)
class RecordedStep:
    """A line of `calls.jsonl`: calls that ended since the previous line; `begin_s` is from the process's first step."""

    step: int
    begin_s: float
    step_s: float
    calls: list[dict[str, Any]] = field(default_factory=list)
    left_out: int = 0


@dataclass(frozen=True, kw_only=True)
class Iteration:
    """A step and all calls that overlap with it."""

    step: int
    step_s: float
    calls: Sequence[RoleCall]
    left_out: int


def recorded_step(line: Mapping[str, Any]) -> RecordedStep:
    """Parse a line; raises `ValueError` if it is not a step with calls."""
    found = fitting(RecordedStep, line)
    for call in found.calls:
        fitting(RoleCall, call)
    return found


def steady_iteration(steps: Sequence[RecordedStep]) -> Iteration | None:
    """The steady step of median length among those with calls; None if there is none."""
    after = {one.step: other for one, other in pairwise(steps)}
    drawn = [step for step in steady(steps) if step.calls and step.step_s > 0]
    if not drawn:
        return None
    chosen = sorted(drawn, key=lambda step: step.step_s)[(len(drawn) - 1) // 2]
    calls, following = _calls(chosen), after.get(chosen.step)
    # A call that continues past the end of a step is in the next line. After a resume, times have another origin.
    if following is not None and following.begin_s >= chosen.begin_s + chosen.step_s:
        shift_s = following.begin_s - chosen.begin_s
        calls += [
            replace(call, begin_s=call.begin_s + shift_s, end_s=call.end_s + shift_s) for call in _calls(following)
        ]
    inside = [call for call in calls if call.end_s > max(0.0, call.begin_s) and call.begin_s < chosen.step_s]
    return Iteration(step=chosen.step, step_s=chosen.step_s, calls=inside, left_out=chosen.left_out) if inside else None


def _calls(step: RecordedStep) -> list[RoleCall]:
    return [fitting(RoleCall, call) for call in step.calls]


def calls_chart(drawn: Iteration) -> TimelineChart:
    """One lane per role, under a heading for its pool, in order of first call."""
    lanes: dict[str, dict[str, list[Interval]]] = {}
    words: list[str] = []
    for call in sorted(drawn.calls, key=lambda call: call.begin_s):
        pieces = lanes.setdefault(call.pool, {}).setdefault(call.role, [])
        times = f" x {call.num}" if call.num > 1 else ""
        words.append(f"{call.role}.{call.method}{times} on {call.pool}")
        # Clip calls to the step.
        begin_s, end_s = max(0.0, call.begin_s), min(drawn.step_s, call.end_s)
        pieces.append(Interval(begin_s, end_s, _COLOURS.get(call.method, call.method), len(words) - 1))
    rows, headings, top = list[Row](), list[tuple[str, int]](), 0
    bars: dict[int, list[Interval]] = {}
    for pool, roles in lanes.items():
        headings.append((escape(pool), top + 15))
        top += _HEADING
        for role, pieces in roles.items():
            bars[len(rows)] = pieces
            rows.append(Row(role, top, _LANE_HEIGHT))
            top += _LANE_HEIGHT + _GAP
    label = f"Timeline of step {drawn.step}: calls of roles by pool"
    return TimelineChart.joined(label, rows, bars, drawn.step_s, words, _MAX_BARS, margin=_GAP, headings=headings)


def call_entries(chart: TimelineChart) -> list[tuple[str, str, str]]:
    """Legend entries for the calls of a chart."""
    known = [(name, f"--c-{name}", "") for name in ROLES if name in chart.categories]
    return [*known, ("other", "--c-other", "")] if chart.categories - set(ROLES) else known
