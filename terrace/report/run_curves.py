"""Curves over the steps of a run: small charts in the colours of the page."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from terrace.base.printable import escape
from terrace.base.words import scaled
from terrace.report.markup import legend
from terrace.report.plot import DIGIT, round_ticks

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 350, 190, 48, 8, 10, 26
_MOST_POINTS = 400  # per line: more than a chart of this width can show
FEWEST_TO_SMOOTH = 40  # points: with fewer a running mean adds nothing to the line
COLOURS = ("--c-forward", "--c-gather", "--c-update", "--c-sync", "--c-reduce")
# (Lengths of dashes and gaps, words): once all colours are used, lines differ in their dashes.
_DASHES = (("", ""), ("7 4", "dashed"), ("2 3", "dotted"), ("9 3 2 3", "dashed and dotted"))

# The running mean gives a step a tenth of the weight, so it is about ten steps behind.
_THIN_AND_THICK = (
    '<ul class="legend quiet"><li><i class=thin></i>each step</li>'
    "<li><i class=thick></i>running mean of about ten steps</li></ul>"
)

Point = tuple[int, float]


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Lines over steps. `smooth` draws a running mean over a faint line, `level` a dashed line with its name."""

    title: str
    lines: Mapping[str, Sequence[Point]]
    unit: str = ""
    smooth: bool = False
    from_zero: bool = False
    level: tuple[str, float] | None = None


def finite(points: Sequence[Point]) -> list[Point]:
    """Points with finite values."""
    return [(step, value) for step, value in points if math.isfinite(value)]


def lines_of(curves: Sequence[Curve]) -> dict[str, Sequence[Point]]:
    """The lines of all charts by name: `Loss: holdout`, or just `Loss` for a chart's only or main line."""
    found: dict[str, Sequence[Point]] = {}
    for curve in curves:
        for line, points in curve.lines.items():
            is_only = len(curve.lines) == 1 or line == curve.title.lower()
            found[curve.title if is_only else f"{curve.title}: {line}"] = points
    return found


def drawable(curves: Sequence[Curve]) -> list[Curve]:
    return [curve for curve in curves if any(finite(points) for points in curve.lines.values())]


def curve_tiles(curves: Sequence[Curve], resumed: Sequence[int] = ()) -> str:
    """Charts of drawable curves side by side; `resumed` are steps after which the run resumed."""
    tiles = []
    for curve in curves:
        entries = [(name, *_look(index)[::2]) for index, name in enumerate(curve.lines)]
        # A single line needs no legend: the title names it.
        key = legend(entries) if len(entries) > 1 else ""
        if curve.smooth and any(len(finite(points)) >= FEWEST_TO_SMOOTH for points in curve.lines.values()):
            key += _THIN_AND_THICK
        unit = f" <span class=quiet>{escape(curve.unit)}</span>" if curve.unit else ""
        tiles.append(f"<figure><h3>{escape(curve.title)}{unit}</h3>{curve_svg(curve, resumed)}{key}</figure>")
    return f"<div class=tiles>{''.join(tiles)}</div>" if tiles else ""


def thinned(points: Sequence[Point]) -> list[Point]:
    """At most `_MOST_POINTS` points: the lowest and the highest of each range of steps, in order."""
    if len(points) <= _MOST_POINTS:
        return list(points)
    # Two points per range keep every spike, which a plain stride would drop.
    size = math.ceil(len(points) / (_MOST_POINTS // 2))
    found = []
    for start in range(0, len(points), size):
        part = points[start : start + size]
        found += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return found


def curve_svg(curve: Curve, marks: Sequence[int] = ()) -> str:
    """Chart of a curve with at least one finite point; `marks` are steps after which the run resumed."""
    lines = {name: finite(points) for name, points in curve.lines.items()}
    points = [point for line in lines.values() for point in line]
    values = [value for _, value in points] + ([curve.level[1]] if curve.level else [])
    # The scale includes the level, so that its line is always visible.
    low, high = (0.0 if curve.from_zero else min(values)), max(values)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (low if curve.from_zero else low - margin), high + margin
    first, last = _span(points)

    def place(step: float, value: float) -> tuple[float, float]:
        across = LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)
        return across, TOP + (high - value) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg class="curve" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(curve.title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    ]
    for tick in round_ticks(low, high):
        y, (number, prefix) = place(first, tick)[1], scaled(tick)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" text-anchor="end">{number:g}{prefix}</text>')
    # Steps are whole numbers: ticks between them would repeat after rounding.
    for tick in dict.fromkeys(round(tick) for tick in round_ticks(first, last)):
        if first <= tick <= last:
            # A long last label would be cut by the picture's edge, so it is moved to the left.
            x = min(place(tick, low)[0], WIDTH - DIGIT * len(str(tick)) / 2)
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{tick}</text>')
    for step in marks:
        if first <= step <= last:
            x = place(step, low)[0]
            words = f"resumed after step {step}"
            parts.append(f'<path class="mark" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"><title>{words}</title></path>')
    label = ""
    if curve.level is not None:
        name, value = curve.level
        y = place(first, value)[1]
        parts.append(f'<path class="limit" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        # Near the upper edge the name goes below its line.
        below = y + 15 if y < TOP + 20 else y - 5
        label = f'<text x="{LEFT + 4}" y="{below:.1f}">{escape(name)}</text>'
    for index, line in enumerate(lines.values()):
        colour, dashes, _ = _look(index)
        if curve.smooth and len(line) >= FEWEST_TO_SMOOTH:
            parts.append(_line([place(*point) for point in thinned(line)], colour, "faint"))
            line = running_mean(line)
        parts.append(_line([place(*point) for point in thinned(line)], colour, "line", dashes))
    # Drawn after the lines, so that the border of its text (page.css) keeps it readable.
    return "".join([*parts, label, "</svg>"])


def curve_data(curve: Curve) -> dict[str, object]:
    """Data for the page's script, which shows the values at a step."""
    lines = {name: finite(points) for name, points in curve.lines.items()}
    first, last = _span([point for line in lines.values() for point in line])
    return {
        "left": LEFT,
        "right": WIDTH - RIGHT,
        "first": first,
        "last": last,
        "unit": curve.unit,
        "lines": {
            name: [[step, float(f"{value:.5g}")] for step, value in thinned(line)] for name, line in lines.items()
        },
    }


def _span(points: Sequence[Point]) -> tuple[int, int]:
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    # A single step is drawn between its neighbours.
    return (first, last) if last > first else (first - 1, last + 1)


def _look(index: int) -> tuple[str, str, str]:
    """(Colour property, dashes, description of the dashes) of a line by its index in a chart."""
    dashes, words = _DASHES[index // len(COLOURS) % len(_DASHES)]
    return COLOURS[index % len(COLOURS)], dashes, words


def _line(places: Sequence[tuple[float, float]], colour: str, kind: str, dashes: str = "") -> str:
    # A line of one point would be invisible, so draw a dot.
    if len(places) == 1:
        ((x, y),) = places
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="var({colour})"/>'
    d = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline class="{kind}" points="{d}" stroke="var({colour})"{dashed}/>'


def running_mean(points: Sequence[Point], weight: float = 0.1) -> list[Point]:
    """Exponential moving averages with bias correction."""
    means: list[Point] = []
    total = weights = 0.0
    for step, value in points:
        total += weight * (value - total)
        weights += weight * (1 - weights)
        means.append((step, total / weights))
    return means
