"""Timeline of one step from trace events, predicted above measured, on one time axis."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.fitting import fitting, parse_table
from terrace.base.foreign import read_text
from terrace.report.bars import Interval
from terrace.report.svg import Row
from terrace.report.timeline import TimelineChart

_MAX_BARS = 1600
_STREAM_HEIGHT, _LANE_HEIGHT, _GAP, _HEADING = 30, 20, 8, 22
_US = 1e6

_SHORTEST_S = 1e-12  # shortest step that is drawn: below it ticks and bars would coincide
_PASSES = ("FORWARD", "BACKWARD")

TraceEvent = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ComparedStep:
    """`otherData` of a trace with a predicted and a measured step; `predicted` is "step" or "passes"."""

    step: int
    rank: int
    predicted: str
    predicted_s: float
    measured_s: float


@dataclass(frozen=True, kw_only=True)
class _Complete:
    pid: int
    tid: int
    name: str
    ts: float
    dur: float
    args: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Metadata:
    pid: int
    tid: int
    name: str
    args: dict[str, Any]


_KINDS: dict[str, type] = {"X": _Complete, "M": _Metadata}


def read_trace(path: Path, folder: Path) -> tuple[list[dict[str, Any]], ComparedStep]:
    """Read a trace of a predicted and a measured step from a run `folder`: (type-checked events, facts).

    Raises `OSError` for an unreadable file, `ValueError` for a damaged one.
    """
    table = parse_table(read_text(path, folder))
    events, other = table.get("traceEvents"), table.get("otherData")
    if not isinstance(other, dict) or not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise ValueError("not a trace of two steps")
    # Other kinds, such as counters, are not drawn.
    drawn = {kind: [event for event in events if event.get("ph") == kind] for kind in _KINDS}
    for kind, found in drawn.items():
        for event in found:
            fitting(_KINDS[kind], event)
    return [*drawn["M"], *drawn["X"]], fitting(ComparedStep, other)


def run_timeline(events: Sequence[TraceEvent], headings: Mapping[int, str]) -> TimelineChart | None:
    """Timeline of a trace's complete events (`ph` "X"), or None if there are none.

    `headings` are the headings of the processes, in the order in which they are drawn.
    """
    words: list[str] = []
    rows: list[Row] = []
    pieces: dict[int, list[Interval]] = {}
    titles: list[tuple[str, int]] = []
    top = 0
    for process, title in headings.items():
        # The compute stream is first, in a taller row under the heading.
        for number, (name, found) in enumerate(_lanes(events, process, words)):
            if number == 0:
                titles.append((title, top + 15))
                top += _HEADING
            pieces[len(rows)] = found
            rows.append(Row(name, top, _LANE_HEIGHT if number else _STREAM_HEIGHT))
            top += rows[-1].height + _GAP
    length_s = max((piece.end_s for row in pieces.values() for piece in row), default=0.0)
    if length_s < _SHORTEST_S:
        return None
    label = "Timeline of a step: " + ", ".join(headings.values())
    return TimelineChart.joined(label, rows, pieces, length_s, words, _MAX_BARS, margin=_GAP, headings=titles)


def _lanes(events: Sequence[TraceEvent], process: int, words: list[str]) -> list[tuple[str, list[Interval]]]:
    # (name, pieces) of each lane, the compute stream first; appends the description of each piece to `words`.
    # Lane names are metadata events.
    names = {
        event["tid"]: str(event["args"].get("name", ""))
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == process
    }
    pieces: dict[int, list[Interval]] = defaultdict(list)
    for event in events:
        # Complete events; their times are in microseconds.
        if event["ph"] == "X" and event["pid"] == process:
            start_s = event["ts"] / _US
            pieces[event["tid"]].append(Interval(start_s, start_s + event["dur"] / _US, event["name"], len(words)))
            instruction = str(event["args"].get("instruction", ""))
            # Waits and messages inside a pass are shown with their instruction, other spans as the instruction alone.
            named = str(event["name"]).startswith("wait ") or (event["tid"] > 0 and instruction.startswith(_PASSES))
            words.append(f"{event['name']}: {instruction}" if named or not instruction else instruction)
    return [(names.get(tid, str(tid)), sorted(pieces[tid])) for tid in sorted(pieces)]
