"""The bars of a timeline: spans by row, the smallest drawn together when there are many.

Spans that are long enough stand alone. Shorter ones that lie close are one bar, whose height is shared out by
the time of each category within it, idle time included: nothing is hidden, whatever the scale.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from terrace.plan.residency import units
from terrace.program import Op
from terrace.simulate.recording import Recording, Span

MAX_BARS = 1000  # of a timeline; two of them keep a page under 200 kB
_MAX_NAMED = 3  # messages of one wait: a choice

Window = tuple[float, float]  # (start, end) in seconds of the step


class Bar(NamedTuple):
    """A bar from `start_s` to `end_s`; `shares` holds the part of its height of each category, at most 1 in all."""

    start_s: float
    end_s: float
    shares: tuple[tuple[str, float], ...]
    words: str


def bars_by_lane(
    recording: Recording, window: Window | None = None, max_bars: int = MAX_BARS
) -> tuple[dict[int, list[Bar]], float]:
    """Return the bars of every lane, cut at the ends of the window, and below how many seconds they are joined.

    The window is the whole step if it is left out. 0 seconds says that every span has its own bar. There are at
    most `max_bars`, unless there are more lanes.
    """
    first_s, last_s = window or (0.0, recording.report.step_s)
    lanes: dict[int, list[Span]] = {lane: [] for lane in recording.lanes}
    for _, span in recording.visible():
        cut = span._replace(start_s=max(first_s, span.start_s), end_s=min(last_s, span.end_s))
        if cut.end_s > cut.start_s:
            lanes[span.lane].append(cut)
    least_s = 0.0
    while True:
        bars = {lane: _bars(recording, spans, least_s) for lane, spans in lanes.items()}
        if sum(map(len, bars.values())) <= max(max_bars, len(lanes)):
            return bars, least_s
        least_s = 1.3 * least_s or (last_s - first_s) / 4096


def middle_unit(recording: Recording) -> Window | None:
    """Return when the unit of micro-batches in the middle of the step passes the blocks; None where there is one."""
    program = recording.program
    parts = units(program.num_micros, program.plan.unit)
    if len(parts) == 1:
        return None
    passes = [
        position
        for position, instruction in enumerate(program.instructions)
        if instruction.op in (Op.FORWARD, Op.BACKWARD) and instruction.micro in parts[len(parts) // 2]
    ]
    return min(recording.started_s[at] for at in passes), max(recording.done_s[at] for at in passes)


def _bars(recording: Recording, spans: Sequence[Span], least_s: float) -> list[Bar]:
    bars: list[Bar] = []
    group: list[Span] = []
    for span in spans:
        long = span.end_s - span.start_s >= least_s
        if group and (long or span.end_s - group[0].start_s > 2 * least_s):
            bars.append(_joined(recording, group))
            group = []
        if long:
            bars.append(_joined(recording, [span]))
        else:
            group.append(span)
    return [*bars, _joined(recording, group)] if group else bars


def _words(recording: Recording, span: Span) -> str:
    """Return what runs; for a wait, who waits and for which messages, the first of them being under way."""
    words = str(recording.program.instructions[span.position])
    if not span.category.startswith("wait "):
        return words
    names = [str(message) for message in recording.awaited(span)]
    if names == [words]:  # CLIP waits for its own message
        return f"{span.category}: {words}"
    if len(names) > _MAX_NAMED:
        names[1:-1] = [f"{len(names) - 2} more"]
    return f"{span.category}: {words} waits for {', then '.join(names)}"


def _joined(recording: Recording, group: Sequence[Span]) -> Bar:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return Bar(first.start_s, first.end_s, ((first.category, 1.0),), _words(recording, first))
    spent: dict[str, float] = defaultdict(float)
    for span in group:
        spent[span.category] += span.end_s - span.start_s
    length_s = last.end_s - first.start_s
    shares = tuple((category, seconds / length_s) for category, seconds in sorted(spent.items()))
    named = ", ".join(f"{category} {round(100 * share)} %" for category, share in shares)
    return Bar(first.start_s, last.end_s, shares, f"{len(group)} together: {named}")
