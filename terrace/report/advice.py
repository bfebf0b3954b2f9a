"""The best next change as a sentence, and a timeline for the terminal."""

import textwrap
from collections.abc import Sequence

from terrace.base.words import seconds
from terrace.program.recording import COMPUTE, Recording
from terrace.simulate.bands import Band
from terrace.simulate.change import Change, best_change

_LETTERS = {
    "forward": "F",
    "backward": "B",
    "update": "U",
    "gather": "g",
    "gather_backward": "b",
    "reduce": "r",
    "sync": "s",
    "refresh": "f",
    "control": "c",
    "dispatch": "d",
    "combine": "m",
    "route": "t",
}
_WAIT, _OTHER, _IDLE = ".", "?", " "
_FEWEST = 20  # minimum letters per line, which the ruler below needs
_BUSY = 0.1  # busy share of a letter's time from which a lane shows its message instead of a blank


def advice_words(candidates: Sequence[Change], step_s: float, band: Band) -> str:
    """The best change of the plan and of the cluster, each with its step time and the prediction's error band."""
    found = {kind: best_change(list(candidates), step_s, kind) for kind in ("plan", "cluster")}
    if not any(found.values()):
        return "No change of one thing makes it shorter."
    # The change with the shorter step comes first.
    parts = []
    for kind, best in sorted(found.items(), key=lambda item: item[1].step_s if item[1] else float("inf")):
        if best is not None:
            change = 100 * (best.step_s / step_s - 1)
            gain = f"{seconds(best.step_s)} {band}, {change:.{0 if change <= -1 else 1}f} %"
            note = f"; {best.note}" if best.note else ""
            parts.append(f"in the {kind}, {best.words} (step {gain}{note})")
    return f"Best next change: {'; '.join(parts)}."


def timeline_text(recording: Recording, width: int = 80) -> str:
    """The step as one line of `width` characters per lane, and a legend. A letter is the longest category in its time.

    Plain ASCII. On the compute stream a dot is waiting; other lanes are blank where they are idle for 90 % of the time.
    """
    step_s = recording.report.step_s or 1.0
    lines = []
    used: set[str] = set()
    names = {lane: recording.lane_name(lane) for lane in recording.lanes}
    margin = max(map(len, names.values()))
    num_letters = max(_FEWEST, width - margin - 3)
    for lane, name in names.items():
        spent: list[dict[str, float]] = [{} for _ in range(num_letters)]
        for _, span in recording.visible():
            if span.lane == lane:
                _spread(spent, span.start_s / step_s, span.end_s / step_s, span.category)
        line = ""
        for column in spent:
            # Waiting on the compute stream is always shown, however short.
            is_idle = sum(column.values()) < (_BUSY / num_letters if lane != COMPUTE else 0.0)
            category = "" if is_idle else max(column.items(), key=lambda item: item[1], default=("", 0.0))[0]
            used.add(category)
            line += _letter(category)
        lines.append(f"{name:<{margin}} |{line}|")
    legend = [f"{letter} {category}" for category, letter in _LETTERS.items() if category in used]
    legend += [f"{_WAIT} waiting"] * any(category.startswith("wait ") for category in used)
    ruler = f"{'':<{margin}} |{'0':<{num_letters - 12}}{seconds(recording.report.step_s):>12}|"
    indent = " " * (margin + 2)
    # No line break between a letter and its meaning.
    told = ", ".join(each.replace(" ", "\N{NO-BREAK SPACE}") for each in legend)
    told = textwrap.fill(told, max(width, 2 * len(indent)), initial_indent=indent, subsequent_indent=indent)
    return "\n".join([*lines, ruler, told.replace("\N{NO-BREAK SPACE}", " ")])


def _letter(category: str) -> str:
    if category.startswith("wait "):
        return _WAIT
    return _LETTERS.get(category, _OTHER) if category else _IDLE


def _spread(columns: list[dict[str, float]], start: float, end: float, category: str) -> None:
    # `start` and `end` are fractions of the step.
    width = len(columns)
    for index in range(max(0, int(start * width)), min(width, int(end * width) + 1)):
        covered = min(end, (index + 1) / width) - max(start, index / width)
        if covered > 0:
            columns[index][category] = columns[index].get(category, 0.0) + covered
