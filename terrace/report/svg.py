"""The frame of charts over time: a gutter for names, a plot, an axis of time.

They are 1080 units wide, with a gutter for names on the left. The plot is an inner <svg>, which the page's script zooms
by its view box, so names and ticks are outside it. Colours are CSS custom properties.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

from terrace.base.printable import escape
from terrace.report.plot import round_ticks

WIDTH, GUTTER, PLOT, AXIS = 1080, 130, 930, 26
_MARGIN = 8  # below the last row
_GLYPH = 7.2  # widest average width of a character at font size 12, in units

Window = tuple[float, float]  # (start, end) in seconds of the step


class Row(NamedTuple):
    """A row of a chart; `name` is drawn in the gutter."""

    name: str
    top: int
    height: int


def rows_svg(
    label: str, rows: Sequence[Row], window: Window, shapes: Iterable[str], *, headings: Iterable[tuple[str, int]] = ()
) -> str:
    """Chart of rows with their names in the gutter, `shapes` in the plot, and a time axis below."""
    height = rows[-1].top + rows[-1].height + _MARGIN + AXIS
    parts = [open_chart(height, label)]
    parts += [f'<text class="heading" x="0" y="{y}">{words}</text>' for words, y in headings]
    for name, top, size in rows:
        words = escape(shortened(name, GUTTER - 12))
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(
            f'<text x="{GUTTER - 8}" y="{top + size / 2 + 4:g}" text-anchor="end">{words}<title>{escape(name)}</title>'
            "</text>"
        )
    parts += [open_plot(height - AXIS), *shapes, "</svg>", time_axis(window, height), "</svg>"]
    return "".join(parts)


def shortened(name: str, room: float) -> str:
    """Truncate a name to `room` units, with an ellipsis."""
    # By the mean width of a letter, since the reader's font is unknown.
    fits = int(room / _GLYPH)
    return name if len(name) <= fits else name[: fits - 1] + "\u2026"


def open_chart(height: float, label: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:g}" role="img" aria-label="{escape(label)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )


def open_plot(height: float) -> str:
    # The script zooms this element by its view box.
    return (
        f'<svg class="plot" x="{GUTTER}" y="0" width="{PLOT}" height="{height:g}" viewBox="0 0 {PLOT} {height:g}" '
        'preserveAspectRatio="none">'
    )


def box(start: float, end: float, top: float, height: float) -> str:
    """Path of a rectangle; `start` and `end` are fractions of the plot's width."""
    left, right, upper, lower = (round(at, 2) for at in (start * PLOT, end * PLOT, top, top + height))
    return f"M{left:g} {upper:g}H{right:g}V{lower:g}H{left:g}z"


def time_axis(window: Window, height: float) -> str:
    first_s, length_s = window[0], (window[1] - window[0]) or 1.0
    ticks = []
    for tick, words in time_ticks(first_s, first_s + length_s):
        x = GUTTER + (tick - first_s) / length_s * PLOT
        anchor = "end" if x > GUTTER + PLOT - 30 else "middle"
        ticks.append(
            f'<path class="tick" d="M{x:.1f} {height - AXIS:g}v5"/>'
            f'<text x="{x:.1f}" y="{height - 6:g}" text-anchor="{anchor}">{words}</text>'
        )
    return f'<g class="axis" data-y="{height - AXIS:g}">{"".join(ticks)}</g>'


def time_ticks(first_s: float, last_s: float) -> list[tuple[float, str]]:
    """Round times in a window with their labels, all in one unit with just enough decimals to distinguish them."""
    # The largest unit in which the end of the window is at least 1.
    factor, unit = next(((f, u) for f, u in ((1.0, "s"), (1e3, "ms")) if last_s * f >= 1), (1e6, "us"))
    ticks = round_ticks(first_s * factor, last_s * factor)
    step = min((after - before for before, after in pairwise(ticks)), default=1.0)
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [(tick / factor, f"{tick:.{decimals}f} {unit}") for tick in ticks]
