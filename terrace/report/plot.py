"""The loss curve as an SVG file."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from terrace.base.printable import escape

WIDTH, HEIGHT, LEFT, BOTTOM, RIGHT = 720, 360, 60, 44, 20
_TOP = 36
DIGIT = 7.2  # largest width of a digit at font size 12, in units, since the reader's font is unknown
_COLOURS = ("#dc2626", "#15803d", "#a16207", "#7c3aed")  # of evaluations


def loss_svg(
    steps: Sequence[int],
    losses: Sequence[float],
    *,
    title: str,
    target: float | None = None,
    evaluated: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({}),
) -> str:
    """Loss over steps as SVG: each step faint, the running mean strong, the target dashed.

    Needs at least one loss, and all must be finite. `evaluated` are losses on other data by name, as (step, loss),
    drawn as lines with dots.
    """
    others = [loss for line in evaluated.values() for _, loss in line]
    low = min([*losses, *others, *([target] if target is not None else [])])
    high = max([*losses, *others])
    # A margin of 5 %, and one of 0.05 for a constant loss.
    low, high = low - 0.05 * (high - low or 1), high + 0.05 * (high - low or 1)
    first, last = steps[0], max(steps[-1], steps[0] + 1)

    def x(step: float) -> float:
        return LEFT + (step - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(loss: float) -> float:
        return _TOP + (high - loss) / (high - low) * (HEIGHT - _TOP - BOTTOM)

    def line(values: Sequence[float], style: str) -> str:
        points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in zip(steps, values, strict=True))
        return f'<polyline points="{points}" fill="none" {style}/>'

    parts = frame(title, "step", {tick: y(tick) for tick in round_ticks(low, high)})
    for tick in round_ticks(first, last):
        # A long last label would be cut by the picture's edge, so it is moved to the left.
        across = min(x(tick), WIDTH - DIGIT * len(f"{tick:g}") / 2)
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="#52525b">{tick:g}</text>')
    parts.append(line(losses, 'stroke="#93c5fd" stroke-width="1"'))
    parts.append(line(_running_mean(losses), 'stroke="#1d4ed8" stroke-width="2"'))
    for index, (name, found) in enumerate(evaluated.items()):
        colour, dots = _COLOURS[index % len(_COLOURS)], [(x(step), y(loss)) for step, loss in found]
        points = " ".join(f"{across:.1f},{down:.1f}" for across, down in dots)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="2.5" fill="{colour}"/>' for across, down in dots]
        label = f'<text x="{WIDTH - RIGHT}" y="{22 + 15 * index}" text-anchor="end" fill="{colour}">'
        parts.append(f"{label}{escape(name)}</text>")
    if target is not None:
        style = 'stroke="#dc2626" stroke-dasharray="6 4"'
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(target):.1f}" y2="{y(target):.1f}" {style}/>')
        label = f'<text x="{WIDTH - RIGHT}" y="{y(target) - 5:.1f}" text-anchor="end" fill="#dc2626">'
        parts.append(f"{label}target {target:g}</text>")
    return "\n".join([*parts, "</svg>\n"])


def frame(title: str, x_label: str, ticks: Mapping[float, float]) -> list[str]:
    """Start an SVG chart: title, name of the x axis, and a line at each tick. The caller appends `</svg>`."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="system-ui, sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    for tick, y in ticks.items():
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e4e7"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#52525b">{tick:g}</text>')
    middle = (LEFT + WIDTH) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle" fill="#52525b">{escape(x_label)}</text>')
    return parts


def _running_mean(values: Sequence[float]) -> list[float]:
    means: list[float] = []
    for value in values:
        # Start at the first loss, since the mean would otherwise rise from zero.
        means.append(value if not means else means[-1] + 0.1 * (value - means[-1]))
    return means


def round_ticks(low: float, high: float) -> list[float]:
    """About five round numbers between `low` and `high`."""
    span = high - low
    # The decade from the printed exponent: log10 could round an exact power down.
    step = 10.0 ** max(-300, int(f"{span / 5:e}".split("e")[1]))
    step *= next(factor for factor in (1, 2, 5, 10) if factor * step >= span / 5)
    tick, ticks = -(-low // step) * step, []
    # For large numbers a step may be below their rounding error, and the loop would not advance.
    while tick <= high and tick + step > tick:
        # -0.0 becomes 0.0, or an axis would say -0.
        ticks.append(round(tick, 10) + 0.0)
        tick += step
    return ticks
