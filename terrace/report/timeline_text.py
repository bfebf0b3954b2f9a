"""A timeline in plain ASCII for the terminal: a line for each row, a letter for the longest category in its time."""

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

from terrace.base.words import seconds
from terrace.program.timeline import TimedSpan, Timeline, TimelineRow

_LETTERS = {
    "forward": "F",
    "backward": "B",
    "weight": "W",
    "update": "U",
    "gather": "g",
    "gather_backward": "b",
    "keep_read": "k",
    "keep_write": "w",
    "row_read": "K",
    "row_write": "w",
    "reduce": "r",
    "sync": "s",
    "refresh": "f",
    "control": "c",
    "dispatch": "d",
    "combine": "m",
    "route": "t",
    "outer": "o",
}
_WAIT, _OTHER, _IDLE, _FILL = ".", "?", " ", "-"
_FEWEST = 20  # minimum letters per line, which the ruler below needs
_BUSY = 0.1  # busy share of a letter's time from which a lane shows its message instead of a blank

_Column = TimedSpan | None  # the span that a letter stands for


def timeline_text(timeline: Timeline, width: int) -> str:
    """The rows in lines of `width` characters, a ruler, and a legend.

    A dot is waiting. A lane is blank where it is idle for 90 % of a letter's time. Spans with a label show it where it
    has room, filled up with dashes: `F3--`.
    """
    margin = max(len(row.name) for row in timeline.rows)
    num_letters = max(_FEWEST, width - margin - 3)
    lines, used = list[str](), set[tuple[str, str]]()
    for row in timeline.rows:
        columns = _columns(timeline, row, num_letters)
        used |= {(_letter(span), span.category) for span in columns if span is not None}
        lines.append(f"{row.name:<{margin}} |{''.join(_label(span, size) for span, size in _runs(columns))}|")
    ruler = f"{'':<{margin}} |{'0':<{num_letters - 12}}{seconds(timeline.length_s):>12}|"
    indent = " " * (margin + 2)
    # No line break between a letter and its meaning.
    told = ", ".join(each.replace(" ", "\N{NO-BREAK SPACE}") for each in _legend(used))
    told = textwrap.fill(told, max(width, 2 * len(indent)), initial_indent=indent, subsequent_indent=indent)
    return "\n".join([*lines, ruler, told.replace("\N{NO-BREAK SPACE}", " ")])


def _columns(timeline: Timeline, row: TimelineRow, number: int) -> list[_Column]:
    """The span of the longest category in each letter's time, None where the row is idle."""
    spent: list[dict[str, float]] = [defaultdict(float) for _ in range(number)]
    newest: list[dict[str, TimedSpan]] = [{} for _ in range(number)]
    column_s = timeline.length_s / number
    for span in timeline.inside(row):
        start, end = (span.start_s - timeline.start_s) / column_s, (span.end_s - timeline.start_s) / column_s
        for index in range(int(start), min(number, int(end) + 1)):
            covered = min(end, index + 1) - max(start, index)
            if covered > 0:
                kind = span.label or span.category
                spent[index][kind] += covered
                newest[index][kind] = span
    # Waiting of a row that computes is always shown, however short.
    least = 0.0 if row.is_main else _BUSY
    found = list[_Column]()
    for times, spans in zip(spent, newest, strict=True):
        is_idle = not times or sum(times.values()) < least
        found.append(None if is_idle else spans[max(times, key=times.__getitem__)])
    return found


def _runs(columns: Sequence[_Column]) -> list[tuple[_Column, int]]:
    return [(span, len(list(group))) for span, group in groupby(columns)]


def _label(span: _Column, size: int) -> str:
    if span is None:
        return _IDLE * size
    if not span.label:
        return _letter(span) * size
    return (span.label if len(span.label) <= size else _letter(span)).ljust(size, _FILL)


def _letter(span: TimedSpan) -> str:
    if span.label:
        return span.label[0]
    return _WAIT if span.category.startswith("wait ") else _LETTERS.get(span.category, _OTHER)


def _legend(used: set[tuple[str, str]]) -> list[str]:
    """The meaning of each letter, in the order of the known categories; all waits share one."""
    order = list(_LETTERS)
    meanings = {(letter, "waiting" if letter == _WAIT else category) for letter, category in used}

    def place(meaning: tuple[str, str]) -> tuple[int, str]:
        letter, category = meaning
        return (order.index(category) if category in order else len(order)), letter

    return [" ".join(meaning) for meaning in sorted(meanings, key=place)]
