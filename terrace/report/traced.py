"""Reads a trace of a predicted and a measured step (terrace.simulate.trace) back into a timeline; it may be damaged."""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.fitting import fitting, parse_table
from terrace.base.foreign import read_text
from terrace.program.timeline import TimedSpan, Timeline, TimelineRow, Words

_US = 1e6
_SHORTEST_S = 1e-12  # shortest step that is drawn: below it ticks and bars would coincide
_PASSES = ("FORWARD", "BACKWARD")
_GROUPS = ("predicted", "measured")  # by process


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


def read_trace(path: Path, folder: Path) -> tuple[Timeline | None, ComparedStep]:
    """The timeline of a trace in a run `folder`, predicted above measured, and its facts; None without spans.

    Raises `OSError` for an unreadable file, `ValueError` for a damaged one.
    """
    table = parse_table(read_text(path, folder))
    events, other = table.get("traceEvents"), table.get("otherData")
    if not isinstance(other, dict) or not isinstance(events, list) or not all(isinstance(e, dict) for e in events):
        raise ValueError("not a trace of two steps")
    names = dict[tuple[int, int], str]()
    spans = defaultdict[tuple[int, int], list[TimedSpan]](list)
    # Other kinds, such as counters, are not drawn.
    for event in events:
        if event.get("ph") == "M":
            named = fitting(_Metadata, event)
            if named.name == "thread_name":
                names[named.pid, named.tid] = str(named.args.get("name", ""))
        elif event.get("ph") == "X":
            found = fitting(_Complete, event)
            spans[found.pid, found.tid].append(_span(found))
    compared = fitting(ComparedStep, other)
    rows = []
    for pid, group in enumerate(_GROUPS):
        # The compute stream is the first thread of a process.
        for place, (_, tid) in enumerate(sorted(key for key in spans if key[0] == pid)):
            name = names.get((pid, tid), str(tid)).removeprefix("lane ")
            own = sorted(spans[pid, tid], key=lambda span: (span.start_s, span.end_s))
            rows.append(TimelineRow(name, own, group, is_main=place == 0))
    end_s = max((span.end_s for row in rows for span in row.spans), default=0.0)
    if end_s < _SHORTEST_S:
        return None, compared
    return Timeline(title="Timeline of a step: predicted, measured", rows=rows, end_s=end_s), compared


def _span(event: _Complete) -> TimedSpan:
    start_s, instruction = event.ts / _US, str(event.args.get("instruction", ""))
    # Waits and messages inside a pass are shown with their instruction, other spans as the instruction alone.
    is_inside = event.tid > 0 and instruction.startswith(_PASSES)
    words = instruction or event.name
    if instruction and (is_inside or event.name.startswith("wait ")):
        words = f"{event.name}: {instruction}"
    return TimedSpan(start_s, start_s + event.dur / _US, event.name, Words(words))
