"""SVG of a pipelined step: one row per stage with tasks over time, and below the memory of each stage.

They share the time axis and the script of the other page (terrace.report.svg).
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence

from terrace.plan.stage import Kind
from terrace.program.instruction import Op
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
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.recorded import RecordedStep
from terrace.simulate.recording import COMPUTE
from terrace.simulate.step import WAITS_ON_STAGES
from terrace.simulate.timeline_picture import task_spans

MAX_BARS = 2000  # of all stages: a page with many stays below a megabyte
CATEGORIES = {Op.FORWARD: "forward", Op.BACKWARD: "backward", Op.BACKWARD_INPUT: "backward"}
CATEGORIES[Op.BACKWARD_WEIGHT] = "weight"
_OPS = {kind: Op[kind.name] for kind in Kind}
_GAP, _TOP = 8, 4
_CLOSE = 32  # tasks of a stage in a close-up


def stage_boxes(num_stages: int) -> list[tuple[int, int]]:
    """(top, height) of the timeline's rows; lower rows if there are many."""
    return _boxes(num_stages, 26 if num_stages <= 16 else 16 if num_stages <= 40 else 12)


def memory_boxes(num_stages: int) -> list[tuple[int, int]]:
    """(top, height) of the memory rows."""
    return _boxes(num_stages, 44 if num_stages <= 8 else 26 if num_stages <= 24 else 14)


def _boxes(num_stages: int, height: int) -> list[tuple[int, int]]:
    return [(_TOP + stage * (height + _GAP), height) for stage in range(num_stages)]


def stage_bars(recorded: RecordedStep, window: Window | None = None) -> tuple[dict[int, list[Bar]], float]:
    """Bars of each stage, its tail included, and the seconds below which tasks are merged.

    Bars are cut at the ends of the window, by default the whole step.
    """
    first_s, last_s = window or (0.0, recorded.end_s)
    rows: dict[int, list[Piece]] = {}
    named: dict[int, list[str]] = {}
    for stage, program in enumerate(recorded.whole.programs):
        spans = task_spans(program.stage, recorded.passes[stage])
        pieces = [
            Piece(span.start_s, span.end_s, CATEGORIES[_OPS[span.task.kind]], number)
            for number, span in enumerate(spans)
        ]
        tail = tail_of(recorded, stage)
        # Tasks first, then the tail: keys of the tail's pieces are moved up by the number of tasks.
        named[stage] = [*(str(span.task) for span in spans), *(piece.category for piece in tail)]
        pieces += [piece._replace(key=len(spans) + number) for number, piece in enumerate(tail)]
        # Pieces outside the window become empty and drop out below.
        cut = (each._replace(start_s=max(first_s, each.start_s), end_s=min(last_s, each.end_s)) for each in pieces)
        rows[stage] = [each for each in cut if each.end_s > each.start_s]

    def words(stage: int, key: int) -> str:
        return f"stage {stage}: {named[stage][key]}"

    return join_bars(rows, last_s - first_s, words, MAX_BARS)


def tail_of(recorded: RecordedStep, stage: int) -> list[Piece]:
    """Computing and waits for data ranks after the last pass of a stage; the key is the span's."""
    recording = recorded.recordings[stage]
    last_s = recorded.passes[stage][-1].end_s - recording.begin_s
    found = []
    for number, span in recording.visible():
        # The tolerance absorbs rounding; waits for other stages are the bubble, which stays blank.
        if span.lane == COMPUTE and span.end_s > last_s + 1e-12 and span.category not in WAITS_ON_STAGES:
            start_s = max(span.start_s, last_s)
            category = span.category.removeprefix("wait ")
            found.append(Piece(recording.begin_s + start_s, recording.begin_s + span.end_s, category, number))
    return found


def close_up(recorded: RecordedStep) -> Window:
    """Window in the middle of the passes, short enough to tell tasks apart."""
    first_s = min(passes[0].start_s for passes in recorded.passes)
    last_s = max(passes[-1].end_s for passes in recorded.passes)
    stages = (program.stage for program in recorded.whole.programs)
    # The stage with most tasks decides how narrow they get.
    num_tasks = max(sum(len(group.micros) for group in stage.groups) for stage in stages)
    # The middle, since all stages are busy there; the ends are the ramps.
    middle_s, span_s = (first_s + last_s) / 2, last_s - first_s
    half_s = min(span_s / 2, _CLOSE * span_s / num_tasks / 2)
    return middle_s - half_s, middle_s + half_s


def stages_svg(recorded: RecordedStep, bars: Mapping[int, Sequence[Bar]], window: Window | None = None) -> str:
    """Timeline of all stages; tasks on the critical path are underlined."""
    first_s, last_s = window or (0.0, recorded.end_s)
    length_s = last_s - first_s
    boxes = stage_boxes(len(recorded.recordings))
    height = boxes[-1][0] + boxes[-1][1] + _GAP + AXIS
    parts = [open_chart(height, "Timeline: a row for every pipeline stage")]
    for stage, (top, size) in enumerate(boxes):
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(name_at(f"stage {stage}", top + size / 2 + 4))
    parts.append(open_plot(height - AXIS))
    for stage, (top, size) in enumerate(boxes):
        # One path per colour, as in `timeline_svg`.
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
    for stage, start_s, end_s in _critical(recorded):
        start, end = max(0.0, (start_s - first_s) / length_s), min(1.0, (end_s - first_s) / length_s)
        if end > start:
            below = boxes[stage][0] + boxes[stage][1] + 2
            parts.append(f'<path class="critical" d="{box(start, end, below, 3)}"/>')
    return "".join([*parts, "</svg>", time_axis((first_s, last_s), height), "</svg>"])


def _critical(recorded: RecordedStep) -> list[tuple[int, float, float]]:
    found: list[tuple[int, float, float]] = []
    for piece in recorded.path.pieces:
        recording = recorded.recordings[piece.stage]
        if recording.spans[piece.number].lane != COMPUTE:
            continue
        start_s, end_s = recording.begin_s + piece.start_s, recording.begin_s + piece.end_s
        # Gaps below a pixel are closed, which keeps the page small.
        if found and found[-1][0] == piece.stage and start_s - found[-1][2] < recorded.end_s / 2000:
            found[-1] = (piece.stage, found[-1][1], end_s)
        else:
            found.append((piece.stage, start_s, end_s))
    return found


def memories_svg(recorded: RecordedStep) -> str:
    """Memory of each stage over the step: constant parts below, changing parts on top, all to one scale."""
    curves, step_s = recorded.curves, recorded.end_s
    boxes = memory_boxes(len(curves))
    height = boxes[-1][0] + boxes[-1][1] + _GAP + AXIS
    # One scale for all stages, so that their rows can be compared.
    highest = max(curve.peak[0] for curve in curves) or 1.0
    parts = [open_chart(height, "Memory of every pipeline stage over the step")]
    for stage, (top, size) in enumerate(boxes):
        parts.append(f'<rect class="row" x="{GUTTER}" y="{top}" width="{PLOT}" height="{size}"/>')
        parts.append(name_at(f"stage {stage}: {quantity(curves[stage].peak[0], 'B')}", top + size / 2 + 4))
    parts.append(open_plot(height - AXIS))
    for (top, size), curve in zip(boxes, curves, strict=True):
        times_s, values = _totals(curve, step_s)
        base, bottom = sum(curve.constant_bytes.values()), top + size
        # Constant states below the level, changing ones above.
        level = bottom - base / highest * size
        upper = [level - value / highest * size for value in values]
        parts.append(f'<path fill="var(--m-activations)" d="{staircase(times_s, upper, step_s, bottom)}"/>')
        parts.append(f'<path fill="var(--m-optimizer)" d="{box(0.0, 1.0, level, bottom - level)}"/>')
    return "".join([*parts, "</svg>", time_axis((0.0, step_s), height), "</svg>"])


def memory_totals(recorded: RecordedStep) -> list[list[int]]:
    """Bytes of each stage by column of its curve, for the script; every third column if there are many stages."""
    # Fewer columns per stage keep pages with many stages small.
    found, stride = [], 1 if len(recorded.curves) <= 16 else 3
    for curve in recorded.curves:
        _, values = _totals(curve, recorded.end_s)
        base = sum(curve.constant_bytes.values())
        found.append([round(base + value) for value in values[::stride]])
    return found


def _totals(curve: MemoryCurve, step_s: float) -> tuple[list[float], list[float]]:
    times_s, columns = memory_columns(curve, step_s)
    return times_s, [sum(parts) for parts in zip(*columns.values(), strict=True)]
