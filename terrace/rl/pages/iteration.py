"""Timeline of the role calls in one iteration of `terrace rl`, one lane per pool and role, from `calls.jsonl`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from terrace.base.fitting import fitting
from terrace.base.words import seconds
from terrace.program.timeline import TimedSpan, Timeline, TimelineRow, Words
from terrace.report.record import steady
from terrace.report.sections import Chart, timeline_chart
from terrace.rl.call_lines import RoleCall

_KINDS = {
    "update": "updates",
    **dict.fromkeys(("give", "take", "hand_over", "write", "load"), "hand over"),
}  # of methods
# Keys of the palette by kind of call; calls and the phases and stages of a step share them.
_COLOURS = {
    "hand over": "sync",
    "generate": "gather",
    "rewards": "control",
    "logprobs": "reduce",
    "values": "gather_backward",
    "updates": "refresh",
}
_OF_PHASES = {
    "reshard": "hand over",
    "reward": "rewards",
    "old_log_prob": "logprobs",
    "ref": "logprobs",
    "prepare": "logprobs",
    "update": "updates",
    "train": "updates",
}


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


def iteration_chart(steps: Sequence[RecordedStep]) -> list[Chart]:
    """The chart of the steady step of median length; none without calls."""
    drawn = steady_iteration(steps)
    if drawn is None:
        return []
    words = (
        f"Step {drawn.step}, of the median length of steady steps: {seconds(drawn.step_s)}. A bar is a call of a role, "
        "from its begin on the first rank to its end on the last, by their clocks; gaps are waits for the controller "
        "or for another pool. What reaches in or out is cut."
    )
    words += f" {drawn.left_out} further calls of the step were not recorded." if drawn.left_out else ""
    return [timeline_chart(iteration_timeline(drawn), caption=words, colours=_COLOURS)]


def iteration_timeline(drawn: Iteration) -> Timeline:
    """One row per role, under a heading for its pool, in order of first call."""
    pools = dict[str, dict[str, list[TimedSpan]]]()
    for call in sorted(drawn.calls, key=lambda call: call.begin_s):
        times = f" x {call.num}" if call.num > 1 else ""
        what = Words(f"{call.role}.{call.method}{times} on {call.pool}")
        spans = pools.setdefault(call.pool, {}).setdefault(call.role, [])
        spans.append(TimedSpan(call.begin_s, call.end_s, _KINDS.get(call.method, call.method), what))
    rows = [
        TimelineRow(role, spans, pool, is_main=False) for pool, roles in pools.items() for role, spans in roles.items()
    ]
    return Timeline(title=f"Timeline of step {drawn.step}: calls of roles by pool", rows=rows, end_s=drawn.step_s)


def call_colour(name: str) -> str:
    """The colour of a phase, a stage or a kind of call, as a key of the palette."""
    return _COLOURS.get(_OF_PHASES.get(name, name), "other")
