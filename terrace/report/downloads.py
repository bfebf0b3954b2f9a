"""Downloads of a page's data: its curves as CSV, and the final figures and settings as JSON.

Each download is embedded in its link (data URL), so that the page stays one file and needs no script.
"""

import base64
import csv
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from terrace.base.printable import escape
from terrace.report.run_curves import Curve, lines_of

_MOST_ROWS = 5_000  # over all runs: about half a megabyte of the page


class _Figure(Protocol):
    @property
    def value(self) -> float: ...


class _Run(Protocol):
    """What is read of a `terrace.report.run_view.RunView`, which offers these downloads."""

    @property
    def name(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def curves(self) -> Sequence[Curve]: ...
    @property
    def final(self) -> Mapping[str, _Figure]: ...
    @property
    def settings(self) -> Mapping[str, Any] | None: ...


def downloads(runs: Sequence[_Run]) -> str:
    """Links to the data of one or several runs; empty for runs without a step."""
    table, stride = steps_csv(runs)
    if not table:
        return ""
    part = f"Every {_ordinal(stride)} step, since there are many; metrics.jsonl has all." if stride > 1 else ""
    links = _link("steps.csv", "text/csv", "Curves as CSV", table)
    links += _link("run.json", "application/json", "Figures and settings as JSON", run_json(runs))
    return f"<p class=downloads>{links}<span class=quiet>{escape(part)}</span></p>"


def steps_csv(runs: Sequence[_Run]) -> tuple[str, int]:
    """(CSV with a row per run and step, "" without steps; stride: every N-th step of a run has a row)."""
    columns = [lines_of(run.curves) for run in runs]
    names = list(dict.fromkeys(name for lines in columns for name in lines))
    by_step: list[dict[int, dict[str, float]]] = []
    for lines in columns:
        rows: dict[int, dict[str, float]] = {}
        for name, points in lines.items():
            for step, value in points:
                rows.setdefault(step, {})[name] = value
        by_step.append(rows)
    stride = max(1, -(-sum(map(len, by_step)) // _MOST_ROWS))
    if not any(by_step):
        return "", stride
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(["run", "step", *map(_cell, names)])
    for run, lines, rows in zip(runs, columns, by_step, strict=True):
        steps = sorted(rows)
        # Always keep the last step, and values that few steps have, such as evaluations.
        kept = {*steps[::stride], *steps[-1:]}
        kept |= {step for points in lines.values() if stride * len(points) <= len(steps) for step, _ in points}
        for step in sorted(kept):
            writer.writerow([_cell(run.name), step, *(rows[step].get(name, "") for name in names)])
    return text.getvalue(), stride


def run_json(runs: Sequence[_Run]) -> str:
    """JSON of the final figures in plain units (seconds, bytes, shares), and of the settings by dotted key."""
    tables = [
        {
            "name": run.name,
            "status": run.status,
            "figures": {key: figure.value for key, figure in run.final.items()},
            "settings": run.settings,
        }
        for run in runs
    ]
    return json.dumps({"runs": tables}, indent=1, default=str)


def _cell(text: str) -> str:
    # A spreadsheet would evaluate these as formulas, and names come from untrusted files.
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _link(name: str, kind: str, words: str, content: str) -> str:
    data = base64.b64encode(content.encode(errors="replace")).decode()
    return f'<a download="{name}" href="data:{kind};charset=utf-8;base64,{data}">{escape(words)}</a>'


def _ordinal(number: int) -> str:
    ending = "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
