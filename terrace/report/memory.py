"""Memory over a step: of one rank by category, and of the ranks of all stages on one scale."""

from collections.abc import Sequence

from terrace.base.words import quantity
from terrace.report.markup import figure, legend
from terrace.report.plot import round_ticks
from terrace.report.sections import Chart
from terrace.report.svg import AXIS, GUTTER, PLOT, Row, box, open_chart, open_plot, rows_svg, time_axis
from terrace.report.timeline import chart_data
from terrace.simulate.curve import MemoryCurve

_HEIGHT, _TOP, _GAP = 200, 12, 8
_COLUMNS = 300  # of a memory curve; each shows its peak
_ROWS = ((24, 14), (8, 26), (0, 44))  # (more stages than this, height of a row)
_MANY = 16  # stages, above which fewer columns of each keep the page small


def memory_chart(curve: MemoryCurve, step_s: float, capacity_bytes: float, caption: str = "") -> Chart:
    """Memory of a rank by category, each in the legend with its own peak, so the sum may exceed the peak of all."""
    highest = {**curve.constant_bytes, **{name: max(values) for name, values in curve.varying_bytes.items()}}
    key = legend((name, f"--m-{name}", quantity(size, "B")) for name, size in highest.items() if size)
    return Chart(
        figure=figure(memory_svg(curve, step_s, capacity_bytes), key, caption),
        data=chart_data(0.0, step_s, memory=memory_totals(curve, step_s)),
    )


def memories_chart(curves: Sequence[MemoryCurve], step_s: float) -> Chart:
    """Memory of the ranks of each stage, with constant parts below and varying parts on top."""
    key = legend([("held throughout", "--m-optimizer", ""), ("comes and goes", "--m-activations", "")])
    caption = "All rows have one scale, whose top is the highest peak of all stages."
    stride = 1 if len(curves) <= _MANY else 3
    totals = [memory_totals(curve, step_s)[::stride] for curve in curves]
    rows = [(row.top, row.height) for row in _rows(curves)]
    return Chart(
        figure=figure(memories_svg(curves, step_s), key, caption),
        data=chart_data(0.0, step_s, rows=rows, memories=totals),
        text=lambda width: memory_text(curves, step_s, width),
    )


def memory_svg(curve: MemoryCurve, step_s: float, capacity_bytes: float) -> str:
    """Memory over the step, constant states at the bottom; a line at `capacity_bytes` if the peak is near it."""
    step_s = step_s or 1.0
    highest = curve.peak[0] or 1.0
    # A capacity far above the peak would flatten the curve.
    near = capacity_bytes <= 1.25 * highest
    top_bytes = 1.05 * max(highest, capacity_bytes if near else 0.0)
    bottom = _TOP + _HEIGHT

    def y(size: float) -> float:
        return bottom - size / top_bytes * _HEIGHT

    parts = [open_chart(bottom + AXIS, "Memory of one rank over the step")]
    for tick in round_ticks(0.0, top_bytes):
        parts.append(f'<path class="grid" d="M{GUTTER} {y(tick):.1f}h{PLOT}"/>')
        parts.append(f'<text x="{GUTTER - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{quantity(tick, "B")}</text>')
    parts.append(open_plot(bottom))
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
    parts.append(time_axis((0.0, step_s), bottom + AXIS))
    return "".join([*parts, "</svg>"])


def memories_svg(curves: Sequence[MemoryCurve], step_s: float) -> str:
    highest = max(curve.peak[0] for curve in curves) or 1.0
    shapes, rows = [], _rows(curves)
    for row, curve in zip(rows, curves, strict=True):
        times_s, columns = memory_columns(curve, step_s)
        bottom = row.top + row.height
        level = bottom - sum(curve.constant_bytes.values()) / highest * row.height
        upper = [level - sum(parts) / highest * row.height for parts in zip(*columns.values(), strict=True)]
        shapes.append(f'<path fill="var(--m-activations)" d="{staircase(times_s, upper, step_s, bottom)}"/>')
        shapes.append(f'<path fill="var(--m-optimizer)" d="{box(0.0, 1.0, level, bottom - level)}"/>')
    return rows_svg("Memory of every pipeline stage over the step", rows, (0.0, step_s), shapes)


def _rows(curves: Sequence[MemoryCurve]) -> list[Row]:
    height = next(height for most, height in _ROWS if len(curves) > most)
    names = [f"stage {stage}: {quantity(curve.peak[0], 'B')}" for stage, curve in enumerate(curves)]
    return [Row(name, 4 + number * (height + _GAP), height) for number, name in enumerate(names)]


def memory_text(curves: Sequence[MemoryCurve], step_s: float, width: int) -> str:
    """One line per stage: the maximum in each column, in tenths of the highest peak."""
    margin = len(f"stage {len(curves) - 1} ")
    columns = max(8, width - margin)
    highest = max(curve.peak[0] for curve in curves) or 1.0
    lines = []
    for stage, curve in enumerate(curves):
        totals, index, line = curve.total_bytes, 0, f"stage {stage} ".ljust(margin)
        for column in range(columns):
            most = totals[index]
            while index + 1 < len(totals) and curve.times_s[index + 1] < (column + 1) / columns * step_s:
                index += 1
                most = max(most, totals[index])
            line += str(min(9, int(10 * most / highest)))
        lines.append(line)
    return "\n".join([*lines, f"9 stands for more than nine tenths of {quantity(highest, 'B')}"])


def memory_columns(curve: MemoryCurve, step_s: float) -> tuple[list[float], dict[str, list[float]]]:
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


def memory_totals(curve: MemoryCurve, step_s: float) -> list[int]:
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
