"""Curves over a doubling x axis, as an SVG file."""

import math
from collections.abc import Mapping, Sequence

from terrace.base.printable import escape
from terrace.report.plot import BOTTOM, HEIGHT, LEFT, RIGHT, WIDTH, frame, round_ticks

_TOP = 56
_COLOURS = ("#1d4ed8", "#dc2626", "#15803d", "#a16207")


def curves_svg(curves: Mapping[str, Sequence[tuple[int, float]]], *, title: str, x_label: str, y_label: str) -> str:
    """Named curves of (x, y) as SVG; x is spaced by doublings, y starts at 0."""
    points = [point for curve in curves.values() for point in curve]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    high = 1.05 * max(y for _, y in points)
    # A single x has no width: avoid the division by zero.
    doublings = math.log2(last / first) or 1.0

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + math.log2(x / first) / doublings * (WIDTH - LEFT - RIGHT)
        return across, _TOP + (high - y) / high * (HEIGHT - _TOP - BOTTOM)

    parts = frame(title, x_label, {tick: place(first, tick)[1] for tick in round_ticks(0, high)})
    parts.append(f'<text x="{LEFT}" y="42" fill="#52525b">{escape(y_label)}</text>')
    for x in sorted({x for x, _ in points}):
        across = place(x, 0)[0]
        parts.append(f'<text x="{across:.1f}" y="{HEIGHT - 24}" text-anchor="middle" fill="#52525b">{x}</text>')
    for index, (name, curve) in enumerate(curves.items()):
        colour, dots = _COLOURS[index % len(_COLOURS)], [place(x, y) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in dots)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in dots]
        label = f'<text x="{WIDTH - RIGHT}" y="{22 + 16 * index}" text-anchor="end" fill="{colour}">'
        parts.append(f"{label}{escape(name)}</text>")
    return "\n".join([*parts, "</svg>\n"])
