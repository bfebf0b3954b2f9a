"""The pictures of a pipelined step: a row a stage, tasks over time, and below the memory of every stage.

They share the time axis and the script of the other page (terrace.report.svg).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from terrace.planner.staged import StagedStep
from terrace.program.schedules import Kind
from terrace.report.bars import Bar, Piece, Window, join_bars
from terrace.report.palette import colour_key
from terrace.report.svg import (
    AXIS,
    GUTTER,
    PLOT,
    SEPARATED,
    box,
    memory_columns,
    name_at,
    open_chart,
    open_plot,
    staircase,
    time_axis,
)
from terrace.report.tables import quantity

MAX_BARS = 2000  # of all stages: a page with many stays below a megabyte
CATEGORIES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "backward"}
CATEGORIES[Kind.BACKWARD_WEIGHT] = "weight"
_GAP, _TOP = 8, 4
_CLOSE = 32  # tasks of a stage in a close-up


def stage_boxes(num_stages: int) -> list[tuple[int, int]]:
    """Return (top, height) of the rows of the timeline: lower where there are many."""
    return _boxes(num_stages, 26 if num_stages <= 16 else 16 if num_stages <= 40 else 12)


def memory_boxes(num_stages: int) -> list[tuple[int, int]]:
    """Return (top, height) of the rows of memory."""
    return _boxes(num_stages, 44 if num_stages <= 8 else 26 if num_stages <= 24 else 14)


def _boxes(num_stages: int, height: int) -> list[tuple[int, int]]:
    return [(_TOP + stage * (height + _GAP), height) for stage in range(num_stages)]


def stage_bars(step: StagedStep, window: Window | None = None) -> tuple[dict[int, list[Bar]], float]:
    """Return the bars of every stage, its tail included, and below how many seconds tasks are joined.

    Bars are cut at the ends of the window, which is the whole step if it is left out.
    """
    first_s, last_s = window or (0.0, step.step_s)
    orders, span_s = step.timeline.orders, step.stretch * step.pipeline.span_s
    rows: dict[int, list[Piece]] = {}
    for stage, tasks in enumerate(orders.tasks):
        times = zip(tasks, step.timeline.starts_s[stage], step.timeline.ends_s[stage], strict=True)
        pieces = [
            Piece(step.stretch * start_s, step.stretch * end_s, CATEGORIES[task.kind], position)
            for position, (task, start_s, end_s) in enumerate(times)
        ]
        now_s = span_s
        for number, (name, seconds) in enumerate(step.stages[stage].tail):
            pieces.append(Piece(now_s, now_s + seconds, name.removeprefix("wait "), len(tasks) + number))
            now_s += seconds
        cut = (each._replace(start_s=max(first_s, each.start_s), end_s=min(last_s, each.end_s)) for each in pieces)
        rows[stage] = [each for each in cut if each.end_s > each.start_s]

    def words(stage: int, key: int) -> str:
        tasks, tail = orders.tasks[stage], step.stages[stage].tail
        return f"stage {stage}: {tasks[key] if key < len(tasks) else tail[key - len(tasks)][0]}"

    return join_bars(rows, last_s - first_s, words, MAX_BARS)


def close_up(step: StagedStep) -> Window:
    """Return a window in the middle of the orders in which tasks are wide enough to be told apart."""
    span_s, num_tasks = step.stretch * step.pipeline.span_s, max(map(len, step.timeline.orders.tasks))
    half_s = min(span_s / 2, _CLOSE * span_s / num_tasks / 2)
    return span_s / 2 - half_s, span_s / 2 + half_s


def stages_svg(step: StagedStep, bars: Mapping[int, Sequence[Bar]], window: Window | None = None) -> str:
    """Return the timeline of all stages; tasks on the critical path are underlined."""
    first_s, last_s = window or (0.0, step.step_s)
    length_s = last_s - first_s
    boxes = stage_boxes(len(step.stages))
    height = boxes[-1][0] + boxes[-1][1] + _GAP + AXIS
    parts = [open_chart(height, "Timeline: a row for every pipeline stage")]
    for stage, (top, size) in enumerate(boxes):
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(name_at(f"stage {stage}", top + size / 2 + 4))
    parts.append(open_plot(height - AXIS))
    for stage, (top, size) in enumerate(boxes):
        outlines: dict[tuple[str, bool], list[str]] = defaultdict(list)
        for bar in bars[stage]:
            start, end = (bar.start_s - first_s) / length_s, min(1.0, (bar.end_s - first_s) / length_s)
            below = float(top + size)
            for category, share in bar.shares:
                below -= share * size
                wide = (end - start) * PLOT >= SEPARATED
                outlines[colour_key(category), wide].append(box(start, end, below, share * size))
        for (key, wide), outline in outlines.items():
            kind = ' class="wide"' if wide else ""
            parts.append(f'<path{kind} fill="var(--c-{key})" d="{"".join(outline)}"/>')
    for stage, start_s, end_s in _critical(step):
        start, end = max(0.0, (start_s - first_s) / length_s), min(1.0, (end_s - first_s) / length_s)
        if end > start:
            below = boxes[stage][0] + boxes[stage][1] + 2
            parts.append(f'<path class="critical" d="{box(start, end, below, 3)}"/>')
    return "".join([*parts, "</svg>", time_axis((first_s, last_s), height), "</svg>"])


def _critical(step: StagedStep) -> list[tuple[int, float, float]]:
    """Return (stage, start, end) of what is on the critical path; tasks that follow one another are one."""
    found: list[tuple[int, float, float]] = []
    for passed in step.timeline.critical_path():
        start_s, end_s = step.stretch * passed.start_s, step.stretch * passed.end_s
        if found and found[-1][0] == passed.stage and start_s - found[-1][2] < step.step_s / 2000:
            found[-1] = (passed.stage, found[-1][1], end_s)
        else:
            found.append((passed.stage, start_s, end_s))
    return found


def memories_svg(step: StagedStep) -> str:
    """Return the memory of every stage over the step: what stays, and the activations on top, all to one scale."""
    boxes = memory_boxes(len(step.stages))
    height = boxes[-1][0] + boxes[-1][1] + _GAP + AXIS
    highest = max(stage.curve.peak[0] for stage in step.stages) or 1.0
    parts = [open_chart(height, "Memory of every pipeline stage over the step")]
    for stage, (top, size) in enumerate(boxes):
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        peak = quantity(step.stages[stage].curve.peak[0], "B")
        parts.append(name_at(f"stage {stage}: {peak}", top + size / 2 + 4))
    parts.append(open_plot(height - AXIS))
    for (top, size), held in zip(boxes, step.stages, strict=True):
        times_s, columns = memory_columns(held.curve, step.step_s)
        base, bottom = sum(held.curve.constant_bytes.values()), top + size
        level = bottom - base / highest * size
        upper = [level - value / highest * size for value in columns["activations"]]
        parts.append(f'<path fill="var(--m-activations)" d="{staircase(times_s, upper, step.step_s, bottom)}"/>')
        parts.append(f'<path fill="var(--m-optimizer)" d="{box(0.0, 1.0, level, bottom - level)}"/>')
    return "".join([*parts, "</svg>", time_axis((0.0, step.step_s), height), "</svg>"])


def memory_totals(step: StagedStep) -> list[list[int]]:
    """Return the bytes of every stage by column of its curve, for the page's script; of many stages every third."""
    found, stride = [], 1 if len(step.stages) <= 16 else 3
    for stage in step.stages:
        _, columns = memory_columns(stage.curve, step.step_s)
        base = sum(stage.curve.constant_bytes.values())
        found.append([round(base + value) for value in columns["activations"][::stride]])
    return found
