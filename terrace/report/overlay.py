"""Several runs on one page and on the terminal: shared charts, final figures side by side, settings that differ."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from terrace.base.words import counted
from terrace.report.downloads import downloads
from terrace.report.markup import prose
from terrace.report.plot import round_ticks
from terrace.report.run_curves import FEWEST_TO_SMOOTH, Curve, Point, finite, running_mean
from terrace.report.run_view import RunView
from terrace.report.sections import Page, Section
from terrace.report.table import Table

MOST_RUNS = 20  # the number of combinations of colours and dashes
_RUNS_PER_TABLE = 4  # what fits into 80 columns beside the names of figures
_UNSET = "-"


def overlay_page(runs: Sequence[RunView]) -> Page:
    names = [run.name for run in runs]
    missing = "".join(f"<li>{prose(words)}</li>" for words in missing_of(runs))
    figures = Table(headings=["figure", *names], rows=[[key, *row] for key, row in figure_rows(runs)], left=["figure"])
    differing = [[key, *row] for key, row in setting_rows(runs)]
    settings = Table(headings=["setting", *names], rows=differing, left=["setting", *names])
    return Page(
        title=f"{counted(len(runs), 'run')}: {', '.join(names)}",
        lead=[f"{run.name}: {run.status}" for run in runs],
        sections=[
            Section(title="Over the steps", curves=overlaid(runs)),
            Section(title="Final figures", table=figures),
            Section(title="Settings that differ", table=settings, words=() if differing else ["No setting differs."]),
            Section(body=downloads(runs)),
            Section(title="What is missing", body=f"<ul class=missing>{missing}</ul>" if missing else ""),
        ],
    )


def missing_of(runs: Sequence[RunView]) -> list[str]:
    """The missing parts that a comparison would show: settings and curves, by which their sentences begin."""
    parts = ("settings", "curves")
    return [f"{run.name}: {words}" for run in runs for words in run.missing if words.startswith(parts)]


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the fewest last components of its path that make all names unique."""
    parts = [folder.resolve().parts for folder in folders]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-number:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def legend_lines(runs: Sequence[RunView]) -> list[str]:
    """One line per run for the terminal: its number in the tables, name and status."""
    return [f"{number}  {run.name}: {run.status}" for number, run in enumerate(runs, 1)]


def overlay_tables(runs: Sequence[RunView]) -> Iterator[Table]:
    """For the terminal: losses over the steps, final figures, and settings that differ."""
    numbers = [str(number) for number in range(1, len(runs) + 1)]
    losses = [curve for curve in overlaid(runs) if curve.title == "Loss" or curve.title.startswith("Loss: ")]
    figures = figure_rows(runs)
    for first in range(0, len(runs), _RUNS_PER_TABLE):
        part = slice(first, first + _RUNS_PER_TABLE)
        for curve in losses:
            rows = _at_steps(curve, part)
            if rows:
                yield Table(title=_title(curve), headings=["after step", *numbers[part]], rows=rows)
        if figures:
            shown = [[key, *words[part]] for key, words in figures]
            yield Table(title="final figures", headings=["", *numbers[part]], left=[""], rows=shown)
    differing = [[key, _grouped(values, numbers)] for key, values in setting_rows(runs)]
    if differing:
        headings = ["setting", "value (runs)"]
        yield Table(title="settings that differ", headings=headings, left=headings, rows=differing)


def overlaid(runs: Sequence[RunView]) -> list[Curve]:
    """One chart per line of the runs' charts, with a line for each run."""
    kinds: dict[tuple[str, str], Curve] = {}
    own = [{curve.title: curve.lines for curve in run.curves} for run in runs]
    for run in runs:
        for curve in run.curves:
            for line in curve.lines:
                kinds.setdefault((curve.title, line), curve)
    num_lines = Counter(title for title, _ in kinds)
    found = []
    for (title, line), like in kinds.items():
        # Runs without the line get an empty one, so that colours are the same in all charts.
        lines = {run.name: curves.get(title, {}).get(line, ()) for run, curves in zip(runs, own, strict=True)}
        named = title if num_lines[title] == 1 or line == title.lower() else f"{title}: {line}"
        found.append(Curve(title=named, lines=lines, unit=like.unit, smooth=like.smooth, from_zero=like.from_zero))
    return found


def figure_rows(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    keys = dict.fromkeys(key for run in runs for key in run.final)
    return [(key, [run.final[key].words if key in run.final else _UNSET for run in runs]) for key in keys]


def setting_rows(runs: Sequence[RunView]) -> list[tuple[str, list[str]]]:
    """(Key, its value in each run) of settings that differ between the runs whose settings can be read."""
    known = [run.settings for run in runs if run.settings is not None]
    rows = []
    for key in sorted({key for settings in known for key in settings}):
        values = [_shown(settings[key]) if key in settings else _UNSET for settings in known]
        if len(set(values)) > 1:
            given = iter(values)
            rows.append((key, ["?" if run.settings is None else next(given) for run in runs]))
    return rows


def _shown(value: object) -> str:
    # With quotes, so that 1 and "1" differ.
    return json.dumps(value, default=str, ensure_ascii=False)


def _at_steps(curve: Curve, part: slice) -> list[list[str]]:
    lines = [finite(points) for points in curve.lines.values()][part]
    lines = [running_mean(line) if _is_dense(line) else line for line in lines]
    steps = sorted({step for line in lines for step, _ in line})
    if not steps:
        return []
    ticks = [*round_ticks(steps[0], steps[-1]), steps[-1]]
    # For each tick, the last step up to it that any run has.
    rows = []
    for step in sorted({steps[max(0, bisect_right(steps, tick) - 1)] for tick in ticks}):
        cells = []
        for line in lines:
            # A run's latest value up to the step; empty after the end of the run.
            at = bisect_right([each for each, _ in line], step)
            cells.append(f"{line[at - 1][1]:.4g}" if at and (at < len(line) or line[-1][0] == step) else "")
        rows.append([f"{step:,}", *cells])
    return rows


def _title(curve: Curve) -> str:
    _, _, source = curve.title.partition(": ")
    title = f"loss of {source}" if source else "loss"
    return f"{title}, running mean" if any(_is_dense(finite(points)) for points in curve.lines.values()) else title


def _is_dense(points: Sequence[Point]) -> bool:
    return len(points) >= FEWEST_TO_SMOOTH


def _grouped(values: Sequence[str], numbers: Sequence[str]) -> str:
    """Each value with the runs that have it."""
    runs: dict[str, list[str]] = {}
    for value, number in zip(values, numbers, strict=True):
        runs.setdefault(value, []).append(number)
    return "; ".join(f"{value} ({', '.join(those)})" for value, those in runs.items())
