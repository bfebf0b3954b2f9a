"""One run of a comparison: curves, final figures and settings, taken from the view of its folder."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from terrace.base.parsing import parse_toml
from terrace.base.words import quantity, scaled, seconds
from terrace.report.folder_parts import steady
from terrace.report.rl_page import RlView
from terrace.report.run_curves import Curve, Point, finite
from terrace.report.run_page import RunView
from terrace.report.tables import utilisation
from terrace.train.metrics import num_final


class Figure(NamedTuple):
    """A final figure of a run: in plain units, and formatted for a table."""

    value: float
    words: str


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the compared runs. `settings` are by dotted key, None if config.toml cannot be read."""

    name: str
    status: str
    curves: Sequence[Curve] = ()
    figures: Mapping[str, Figure] = field(default_factory=dict)
    settings: Mapping[str, Any] | None = None
    missing: Sequence[str] = ()


def side_of_run(name: str, view: RunView) -> Side:
    """The side of a `terrace train` run."""
    curves = {curve.title: curve for curve in view.curves}
    figures = dict[str, Figure]()

    def add(words: str, value: float, shown: str) -> None:
        if math.isfinite(value):
            figures[words] = Figure(value, shown)

    losses = dict(curves["Loss"].lines) if "Loss" in curves else {}
    own = losses.pop("loss", [])
    if own:
        add("steps", own[-1][0], f"{own[-1][0]:,}")
        add("loss, mean of the last tenth", _end(own), f"{_end(own):.4g}")
    for source, points in losses.items():
        found = finite(points)
        if found:
            add(f"{source}: last loss", found[-1][1], f"{found[-1][1]:.4g}")
            step, lowest = min(found, key=lambda point: point[1])
            add(f"{source}: lowest loss", lowest, f"{lowest:.4g} (step {step})")
    for title, line, words, shown in (
        ("Throughput", "tokens/s", "tokens/s", lambda value: quantity(value, "").strip()),
        ("Utilisation", "MFU", "MFU", lambda value: utilisation(value / 100)),
        ("Utilisation", "HFU", "HFU", lambda value: utilisation(value / 100)),
        ("Seconds of a step", "step", "step", seconds),
    ):
        points = finite(steady(curves[title].lines.get(line, ()))) if title in curves else []
        if points:
            mean = statistics.fmean(value for _, value in points)
            add(words, mean, shown(mean))
    predicted, measured = view.time_s
    if predicted:
        add("predicted step", sum(predicted.values()), seconds(sum(predicted.values())))
    waits_s = sum(spent for category, spent in measured.items() if category.startswith("wait "))
    if sum(measured.values()) > 0:
        add("waits of rank 0", waits_s / sum(measured.values()), f"{100 * waits_s / sum(measured.values()):.0f} %")
    for tier, size in view.sent_bytes.measured.items():
        add(f"sent by rank 0 on {tier}", size, quantity(size, "B"))
    for kind, size in view.peak_memory.items():
        add(f"memory of rank 0, {kind}", size, quantity(size, "B"))
    return _side(name, view, figures)


def side_of_rl(name: str, view: RlView) -> Side:
    """The side of a `terrace rl` run; its figures are the final values of its curves."""
    figures = dict[str, Figure]()
    for title, points in lines_of(view.curves).items():
        end = _end(points) if points else math.nan
        if math.isfinite(end):
            number, prefix = scaled(end)
            figures[title] = Figure(end, f"{number:.4g}{f' {prefix}' * bool(prefix)}")
    return _side(name, view, figures)


def _side(name: str, view: RunView | RlView, figures: Mapping[str, Figure]) -> Side:
    return Side(
        name=name,
        status=view.status,
        curves=view.curves,
        figures=figures,
        settings=_flat_settings(view.settings),
        missing=_of_parts(view.missing),
    )


def names_of(folders: Sequence[Path]) -> list[str]:
    """A name for each folder: the fewest last components of its path that make all names unique."""
    parts = [folder.resolve().parts for folder in folders]
    for number in range(1, max(map(len, parts)) + 1):
        names = ["/".join(each[-number:]) for each in parts]
        if len(set(names)) == len(names):
            break
    return names


def lines_of(curves: Sequence[Curve]) -> dict[str, Sequence[Point]]:
    """The lines of all charts by name: `Loss: holdout`, or just `Loss` for a chart's only or main line."""
    found: dict[str, Sequence[Point]] = {}
    for curve in curves:
        for line, points in curve.lines.items():
            is_only = len(curve.lines) == 1 or line == curve.title.lower()
            found[curve.title if is_only else f"{curve.title}: {line}"] = points
    return found


def _end(points: Sequence[Point]) -> float:
    # The same steps by which `train.target_loss` judges a run.
    last = [value for _, value in points[-num_final(len(points)) :]]
    return statistics.fmean(last) if all(map(math.isfinite, last)) else math.nan


def _of_parts(missing: Sequence[str]) -> list[str]:
    # Sentences begin with the missing part; a comparison shows only settings and curves.
    return [words for words in missing if words.startswith(("settings", "curves"))]


def _flat_settings(text: str) -> dict[str, Any] | None:
    with suppress(ValueError):
        return _flat(parse_toml(text)) or None
    return None


def _flat(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{before}{key}.")
        else:
            found[f"{before}{key}"] = value
    return found
