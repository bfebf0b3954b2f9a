"""SVG charts of the pages: rows over time, and memory, on the same time axis.

Both are 1080 units wide, with a gutter for names on the left. The plot is an inner <svg>, which the page's script zooms
by its view box, so names and ticks are outside it. Colours are CSS custom properties.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from terrace.base.printable import escape
from terrace.base.words import quantity
from terrace.report.bars import Window
from terrace.report.plot import round_ticks

if TYPE_CHECKING:
    from terrace.simulate.curve import MemoryCurve

WIDTH, GUTTER, PLOT, _AXIS = 1080, 130, 930, 26
_MEMORY_HEIGHT, _MEMORY_TOP = 200, 12
_GLYPH = 7.2  # widest average width of a character at font size 12, in units
_COLUMNS = 300  # of a memory curve; each shows its peak


class Row(NamedTuple):
    """A row of a chart; `name` is drawn in the gutter."""

    name: str
    top: int
    height: int


def rows_svg(
    label: str,
    rows: Sequence[Row],
    window: Window,
    shapes: Iterable[str],
    *,
    margin: int = 8,
    headings: Iterable[tuple[str, int]] = (),
) -> str:
    """Chart of rows with their names in the gutter, `shapes` in the plot, and a time axis `margin` units below."""
    height = rows[-1].top + rows[-1].height + margin + _AXIS
    parts = [_open_chart(height, label)]
    parts += [f'<text class="heading" x="0" y="{y}">{words}</text>' for words, y in headings]
    for name, top, size in rows:
        words = escape(shortened(name, GUTTER - 12))
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(
            f'<text x="{GUTTER - 8}" y="{top + size / 2 + 4:g}" text-anchor="end">{words}<title>{escape(name)}</title>'
            "</text>"
        )
    parts += [_open_plot(height - _AXIS), *shapes, "</svg>", _time_axis(window, height), "</svg>"]
    return "".join(parts)


def memory_svg(curve: "MemoryCurve", step_s: float, capacity_bytes: float) -> str:
    """Memory over the step, constant states at the bottom; a line at `capacity_bytes` if the peak is near it."""
    step_s = step_s or 1.0
    highest = curve.peak[0] or 1.0
    # A capacity far above the peak would flatten the curve.
    near = capacity_bytes <= 1.25 * highest
    top_bytes = 1.05 * max(highest, capacity_bytes if near else 0.0)
    bottom = _MEMORY_TOP + _MEMORY_HEIGHT

    def y(size: float) -> float:
        return bottom - size / top_bytes * _MEMORY_HEIGHT

    parts = [_open_chart(bottom + _AXIS, "Memory of one rank over the step")]
    for tick in round_ticks(0.0, top_bytes):
        parts.append(f'<path class="grid" d="M{GUTTER} {y(tick):.1f}h{PLOT}"/>')
        parts.append(f'<text x="{GUTTER - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{quantity(tick, "B")}</text>')
    parts.append(_open_plot(bottom))
    times_s, columns = memory_columns(curve, step_s)
    base = sum(curve.constant_bytes.values())
    # Bands are stacked by drawing the highest first, each partly covered by the next lower one.
    layers: list[tuple[str, list[float]]] = []
    for name, values in columns.items():
        lower = layers[-1][1] if layers else [float(base)] * len(values)
        layers.append((name, [below + value for below, value in zip(lower, values, strict=True)]))
    for name, upper in reversed(layers):  # each is drawn over the one above it
        if any(columns[name]):
            d = staircase(times_s, [y(value) for value in upper], step_s, bottom)
            parts.append(f'<path class="band" fill="var(--m-{name})" d="{d}"/>')
    for name, size in reversed(list(curve.constant_bytes.items())):
        if size:
            parts.append(f'<path class="band" fill="var(--m-{name})" d="{box(0.0, 1.0, y(base), bottom - y(base))}"/>')
        base -= size
    parts.append("</svg>")
    if near:
        parts.append(f'<path class="limit" d="M{GUTTER} {y(capacity_bytes):.1f}h{PLOT}"/>')
    parts.append(_time_axis((0.0, step_s), bottom + _AXIS))
    return "".join([*parts, "</svg>"])


def shortened(name: str, room: float) -> str:
    """Truncate a name to `room` units, with an ellipsis."""
    # By the mean width of a letter, since the reader's font is unknown.
    fits = int(room / _GLYPH)
    return name if len(name) <= fits else name[: fits - 1] + "\u2026"


def _open_chart(height: float, label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def _open_plot(height: float) -> str:
    # The script zooms this element by its view box.
    return (
        f'<svg class="plot" x="{GUTTER}" y="0" width="{PLOT}" height="{height:g}" viewBox="0 0 {PLOT} {height:g}" '
        'preserveAspectRatio="none">'
    )


def box(start: float, end: float, top: float, height: float) -> str:
    """Path of a rectangle; `start` and `end` are fractions of the plot's width."""
    left, right, upper, lower = (round(at, 2) for at in (start * PLOT, end * PLOT, top, top + height))
    return f"M{left:g} {upper:g}H{right:g}V{lower:g}H{left:g}z"


def _time_axis(window: Window, height: float) -> str:
    first_s, length_s = window[0], (window[1] - window[0]) or 1.0
    ticks = []
    for tick, words in time_ticks(first_s, first_s + length_s):
        x = GUTTER + (tick - first_s) / length_s * PLOT
        anchor = "end" if x > GUTTER + PLOT - 30 else "middle"
        ticks.append(
            f'<path class="tick" d="M{x:.1f} {height - _AXIS:g}v5"/>'
            f'<text x="{x:.1f}" y="{height - 6:g}" text-anchor="{anchor}">{words}</text>'
        )
    return f'<g class="axis" data-y="{height - _AXIS:g}">{"".join(ticks)}</g>'


def time_ticks(first_s: float, last_s: float) -> list[tuple[float, str]]:
    """Round times in a window with their labels, all in one unit with just enough decimals to distinguish them."""
    # The largest unit in which the end of the window is at least 1.
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if last_s * f >= 1), (1e6, "us"))
    ticks = round_ticks(first_s * factor, last_s * factor)
    step = min((after - before for before, after in pairwise(ticks)), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(tick / factor, f"{tick:.{decimals}f} {unit}") for tick in ticks]


def memory_columns(curve: "MemoryCurve", step_s: float) -> tuple[list[float], dict[str, list[float]]]:
    """(Start times, bytes by category) of `_COLUMNS` columns of a memory curve, each with the values at its peak."""
    totals = curve.total_bytes
    times_s: list[float] = []
    values: dict[str, list[float]] = {name: [] for name in curve.varying_bytes}
    index = 0
    for column in range(_COLUMNS):
        highest = index
        while index + 1 < len(totals) and curve.times_s[index + 1] < (column + 1) / _COLUMNS * step_s:
            index += 1
            highest = index if totals[index] > totals[highest] else highest
        times_s.append(column / _COLUMNS * step_s)
        for name, parts in curve.varying_bytes.items():
            values[name].append(parts[highest])
    return times_s, values


def memory_totals(curve: "MemoryCurve", step_s: float) -> list[int]:
    """Total bytes in each column of the curve, for the page's script."""
    _, columns = memory_columns(curve, step_s or 1.0)
    held = sum(curve.constant_bytes.values())
    return [round(held + sum(parts)) for parts in zip(*columns.values(), strict=True)]


def staircase(times_s: Sequence[float], heights: Sequence[float], step_s: float, bottom: float) -> str:
    """Path of a step function that is `heights[i]` from `times_s[i]` on, closed at `bottom`."""
    d, before = f"M0 {bottom:g}", float("nan")
    for moment_s, height in zip(times_s, heights, strict=True):
        if height != before:
            d += f"H{moment_s / step_s * PLOT:.1f}V{height:.1f}"
            before = height
    return f"{d}H{PLOT}V{bottom:g}z"
