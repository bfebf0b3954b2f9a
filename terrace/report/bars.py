"""Bars of a timeline: spans by row, with short adjacent spans merged when there are many.

A merged bar's height is divided among its categories and idle time by their share of its time, so that no time is
hidden at any scale.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from terrace.plan.stage import units
from terrace.program.instruction import Op
from terrace.program.recording import Recording, Span

MAX_BARS = 1000  # per timeline; two timelines keep a page under 200 kB
_MAX_NAMED = 3  # messages named per wait; a guess

Window = tuple[float, float]  # (start, end) in seconds of the step


class Bar(NamedTuple):
    """Bar from `start_s` to `end_s`; `shares` gives each category's fraction of its height, at most 1 in total."""

    start_s: float
    end_s: float
    shares: tuple[tuple[str, float], ...]
    words: str


class Interval(NamedTuple):
    """Time interval of one category; `key` is the argument to look up its description."""

    start_s: float
    end_s: float
    category: str
    key: int


def join_bars(
    rows: Mapping[int, Sequence[Interval]], length_s: float, words: Callable[[int, int], str], max_bars: int
) -> tuple[dict[int, list[Bar]], float]:
    """(bars of each row, threshold in seconds below which pieces were merged, 0 if none were).

    `words(row, key)` describes a bar of one piece. Returns at most `max_bars` bars, but at least one per row.
    """
    least_s = 0.0
    while True:
        bars = {row: _bars(row, pieces, least_s, words) for row, pieces in rows.items()}
        if sum(map(len, bars.values())) <= max(max_bars, len(rows)):
            return bars, least_s
        # Start at 1/4096 of the picture, about a screen pixel at full zoom out, and coarsen by 30 %.
        least_s = 1.3 * least_s or length_s / 4096


def bars_by_lane(recording: Recording, window: Window | None = None) -> tuple[dict[int, list[Bar]], float]:
    """(bars of each lane, clipped to the window, threshold in seconds below which spans were merged).

    The window defaults to the whole step; threshold 0 means that every span has its own bar. Returns at most `MAX_BARS`
    bars, but at least one per lane.
    """
    first_s, last_s = window or (0.0, recording.report.step_s)
    # Lanes without spans still get a row.
    lanes: dict[int, list[Interval]] = {lane: [] for lane in recording.lanes}
    for number, span in recording.visible():
        start_s, end_s = max(first_s, span.start_s), min(last_s, span.end_s)
        if end_s > start_s:
            lanes[span.lane].append(Interval(start_s, end_s, span.category, number))

    def words(_: int, number: int) -> str:
        return _words(recording, recording.spans[number])

    return join_bars(lanes, last_s - first_s, words, MAX_BARS)


def middle_unit(recording: Recording) -> Window | None:
    """The window in which the middle unit of micro-batches is computed; None if the step has one unit."""
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


def _bars(row: int, pieces: Sequence[Interval], least_s: float, words: Callable[[int, int], str]) -> list[Bar]:
    bars: list[Bar] = []
    group: list[Interval] = []
    for piece in pieces:
        long = piece.end_s - piece.start_s >= least_s
        # A group ends before a long piece and is at most twice the threshold wide.
        if group and (long or piece.end_s - group[0].start_s > 2 * least_s):
            bars.append(_joined(row, group, words))
            group = []
        if long:
            bars.append(_joined(row, [piece], words))
        else:
            group.append(piece)
    return [*bars, _joined(row, group, words)] if group else bars


def _words(recording: Recording, span: Span) -> str:
    # A wait names the messages it is for; the first one is on the wire.
    words = str(recording.program.instructions[span.position])
    if not span.category.startswith("wait "):
        return words
    names = [str(message) for message in recording.awaited(span)]
    if names == [words]:  # CLIP waits for its own message
        return f"{span.category}: {words}"
    if len(names) > _MAX_NAMED:
        names[1:-1] = [f"{len(names) - 2} more"]
    return f"{span.category}: {words} waits for {', then '.join(names)}"


def _joined(row: int, group: Sequence[Interval], words: Callable[[int, int], str]) -> Bar:
    first, last = group[0], group[-1]
    if len(group) == 1:
        return Bar(first.start_s, first.end_s, ((first.category, 1.0),), words(row, first.key))
    spent: dict[str, float] = defaultdict(float)
    for piece in group:
        spent[piece.category] += piece.end_s - piece.start_s
    # Avoid 0 / 0 for pieces without length at one moment.
    length_s = last.end_s - first.start_s or 1.0
    shares = tuple((category, seconds / length_s) for category, seconds in sorted(spent.items()))
    # Shares are of the bar's length, so idle time is the missing rest.
    named = ", ".join(f"{category} {round(100 * share)} %" for category, share in shares)
    return Bar(first.start_s, last.end_s, shares, f"{len(group)} together: {named}")
