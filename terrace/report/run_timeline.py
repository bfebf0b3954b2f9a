"""Timeline of one step from trace events: predicted above measured, on one time axis."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from terrace.report.bars import Bar, Piece, join_bars
from terrace.report.palette import MESSAGES, STREAM, colour_key
from terrace.report.svg import AXIS, GUTTER, PLOT, SEPARATED, box, name_at, open_chart, open_plot, time_axis

_MAX_BARS = 1600
_STREAM_HEIGHT, _LANE_HEIGHT, _GAP, _HEADING = 30, 20, 8, 22
_US = 1e6

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class _Row:
    process: int
    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, kw_only=True)
class StepPicture:
    """SVG of a step, data for its script, its colours, and the seconds below which spans are merged."""

    svg: str
    data: Mapping[str, object]
    keys: tuple[str, ...]
    least_s: float


def step_picture(events: Sequence[Event], headings: Mapping[int, str]) -> StepPicture | None:
    """Picture of the complete events of a trace, or None if there are none.

    `headings` gives the heading above the rows of each process, in this order.
    """
    words: list[str] = []
    rows = [row for process in headings for row in _rows(events, process, words)]
    length_s = max((piece.end_s for row in rows for piece in row.pieces), default=0.0)
    if not length_s:
        return None
    pieces = {number: row.pieces for number, row in enumerate(rows)}
    bars, least_s = join_bars(pieces, length_s, lambda _, key: words[key], _MAX_BARS)
    boxes, titles, height = _boxes(rows, headings)
    parts = [open_chart(height, "Timeline of a step: " + ", ".join(headings.values()))]
    parts += [f'<text class="heading" x="0" y="{y}">{title}</text>' for title, y in titles]
    for row, (top, size) in zip(rows, boxes, strict=True):
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(name_at(row.name, top + size / 2 + 4))
    parts.append(open_plot(height - AXIS))
    for number, (top, size) in enumerate(boxes):
        parts += _paths(bars[number], top, size, length_s)
    keys = {colour_key(category) for row in bars.values() for bar in row for category, _ in bar.shares}
    data = {
        "start_s": 0.0,
        "length_s": length_s,
        "zooms": True,
        "rows": boxes,
        "bars": [[_unit(bar, length_s) for bar in bars[number]] for number in range(len(rows))],
    }
    return StepPicture(
        svg="".join([*parts, "</svg>", time_axis((0.0, length_s), height), "</svg>"]),
        data=data,
        keys=tuple(key for key in (*STREAM, *MESSAGES, "other") if key in keys),
        least_s=least_s,
    )


def _rows(events: Sequence[Event], process: int, words: list[str]) -> list[_Row]:
    # The compute stream first. Appends the description of each piece to `words`.
    # Lane names are metadata events of the trace.
    names = {
        event["tid"]: str(event["args"]["name"])
        for event in events
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == process
    }
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for event in events:
        # Complete events; their times are in microseconds.
        if event["ph"] == "X" and event["pid"] == process:
            start_s = event["ts"] / _US
            pieces[event["tid"]].append(Piece(start_s, start_s + event["dur"] / _US, event["name"], len(words)))
            instruction = str(event["args"].get("instruction", ""))
            # A wait is named with its instruction; other spans are the instruction.
            is_wait = str(event["name"]).startswith("wait ")
            words.append(f"{event['name']}: {instruction}" if is_wait or not instruction else instruction)
    return [
        _Row(process=process, name=names.get(tid, str(tid)), pieces=tuple(sorted(pieces[tid])))
        for tid in sorted(pieces)
    ]


def _boxes(
    rows: Sequence[_Row], headings: Mapping[int, str]
) -> tuple[list[tuple[int, int]], list[tuple[str, int]], int]:
    # (top, height) of every row, (heading, baseline) of every process, and the whole height.
    boxes, titles, top, process = [], [], 0, None
    for row in rows:
        if row.process != process:
            process = row.process
            titles.append((headings[process], top + 15))
            top += _HEADING
            size = _STREAM_HEIGHT
        else:
            size = _LANE_HEIGHT
        boxes.append((top, size))
        top += size + _GAP
    return boxes, titles, top + AXIS


def _paths(bars: Sequence[Bar], top: int, size: int, length_s: float) -> list[str]:
    # One path per colour, as in `timeline_svg`.
    outlines: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for bar in bars:
        below, start, end = float(top + size), bar.start_s / length_s, bar.end_s / length_s
        for category, share in bar.shares:
            # Shares of a merged bar are stacked from the bottom.
            below -= share * size
            outlines[colour_key(category), (end - start) * PLOT >= SEPARATED].append(
                box(start, end, below, share * size)
            )
    found = []
    for (key, is_wide), outline in outlines.items():
        kind = ' class="wide"' if is_wide else ""
        found.append(f'<path{kind} fill="var(--c-{key})" d="{"".join(outline)}"/>')
    return found


def _unit(bar: Bar, length_s: float) -> list[object]:
    return [round(bar.start_s / length_s * PLOT, 2), round(bar.end_s / length_s * PLOT, 2), bar.words]
