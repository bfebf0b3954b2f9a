"""Several runs compared on the terminal: losses, final figures and differing settings, in tables of 80 columns."""

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from rich.table import Table

from terrace.report.overlay import figure_rows, overlaid, setting_rows
from terrace.report.plot import round_ticks
from terrace.report.run_curves import FEWEST_TO_SMOOTH, Curve, Point, finite, running_mean
from terrace.report.sides import Side
from terrace.report.tables import new_table

_RUNS_PER_TABLE = 4  # what fits into 80 columns beside the names of figures


def legend_lines(sides: Sequence[Side]) -> list[str]:
    """One line per run: its number in the tables, name and status."""
    return [f"{number}  {side.name}: {side.status}" for number, side in enumerate(sides, 1)]


def overlay_tables(sides: Sequence[Side]) -> Iterator[Table]:
    """Losses over the steps, final figures, and settings that differ."""
    numbers = [str(number) for number in range(1, len(sides) + 1)]
    losses = [curve for curve in overlaid(sides) if curve.title == "Loss" or curve.title.startswith("Loss: ")]
    figures = figure_rows(sides)
    for first in range(0, len(sides), _RUNS_PER_TABLE):
        part = slice(first, first + _RUNS_PER_TABLE)
        for curve in losses:
            rows = _at_steps(curve, part)
            if rows:
                yield new_table(_title(curve), ["after step", *numbers[part]], rows=rows)
        rows = [[key, *words[part]] for key, words in figures]
        if rows:
            yield new_table("final figures", ["", *numbers[part]], left=("",), rows=rows)
    rows = [[key, _grouped(values, numbers)] for key, values in setting_rows(sides)]
    if rows:
        yield new_table(
            "settings that differ", ["setting", "value (runs)"], left=("setting", "value (runs)"), rows=rows
        )


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
