"""SVG of a pipelined step: one row per stage with tasks over time, and below the memory of each stage.

They share the time axis and the script of the other page (terrace.report.svg).
"""

from collections.abc import Iterator, Sequence

from terrace.plan.stage import Pass
from terrace.program.recording import COMPUTE
from terrace.report.bars import Bar, Interval, Window, join_bars
from terrace.report.svg import Row, box, memory_columns, rows_svg, staircase
from terrace.report.tables import quantity
from terrace.report.timeline import Stretch, TimelineChart, joined
from terrace.simulate.recorded import RecordedStep
from terrace.simulate.step import WAITS_ON_STAGES
from terrace.simulate.timeline_picture import task_spans

MAX_BARS = 2000  # of all stages: a page with many stays below a megabyte
_CATEGORIES = {
    Pass.FORWARD: "forward",
    Pass.BACKWARD: "backward",
    Pass.BACKWARD_INPUT: "backward",
    Pass.BACKWARD_WEIGHT: "weight",
}
_GAP, _TOP = 8, 4
_CLOSE = 32  # tasks of a stage in a close-up


def stage_bars(recorded: RecordedStep, window: Window | None = None) -> tuple[dict[int, list[Bar]], float]:
    """Bars of each stage, its tail included, and the seconds below which tasks are merged.

    Bars are cut at the ends of the window, by default the whole step.
    """
    first_s, last_s = window or (0.0, recorded.end_s)
    rows: dict[int, list[Interval]] = {}
    named: dict[int, list[str]] = {}
    for stage, program in enumerate(recorded.whole.programs):
        tasks = task_spans(program.stage, recorded.passes[stage])
        drawn = [(span.start_s, span.end_s, _CATEGORIES[span.task.pass_], str(span.task)) for span in tasks]
        drawn += [(start_s, end_s, category, category) for start_s, end_s, category in _tail_of(recorded, stage)]
        named[stage] = [words for *_, words in drawn]
        # Pieces outside the window become empty and drop out below.
        cut = (
            Interval(max(first_s, start_s), min(last_s, end_s), category, number)
            for number, (start_s, end_s, category, _) in enumerate(drawn)
        )
        rows[stage] = [each for each in cut if each.end_s > each.start_s]

    def words(stage: int, key: int) -> str:
        return f"stage {stage}: {named[stage][key]}"

    return join_bars(rows, last_s - first_s, words, MAX_BARS)


def _tail_of(recorded: RecordedStep, stage: int) -> Iterator[tuple[float, float, str]]:
    # (start, end, category) of computing and waits for data ranks after the last pass of a stage.
    recording = recorded.recordings[stage]
    last_s = recorded.passes[stage][-1].end_s - recording.begin_s
    for _, span in recording.visible():
        # The tolerance absorbs rounding; waits for other stages are the bubble, which stays blank.
        if span.lane == COMPUTE and span.end_s > last_s + 1e-12 and span.category not in WAITS_ON_STAGES:
            start_s = recording.begin_s + max(span.start_s, last_s)
            yield start_s, recording.begin_s + span.end_s, span.category.removeprefix("wait ")


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


def stages_timeline(recorded: RecordedStep, window: Window | None = None) -> TimelineChart:
    """Timeline of all stages, of the whole step or of a window; tasks on the critical path are underlined."""
    bars, least_s = stage_bars(recorded, window)
    num_stages = len(recorded.recordings)
    # Lower rows where there are many.
    size = 26 if num_stages <= 16 else 16 if num_stages <= 40 else 12
    return TimelineChart(
        label="Timeline: a row for every pipeline stage",
        rows=_rows([f"stage {stage}" for stage in range(num_stages)], size),
        bars=[bars[stage] for stage in range(num_stages)],
        window=window or (0.0, recorded.end_s),
        least_s=least_s,
        critical=joined(_critical(recorded), recorded.end_s / 2000),
        gap=2,
    )


def _rows(names: Sequence[str], size: int) -> list[Row]:
    return [Row(name, _TOP + number * (size + _GAP), size) for number, name in enumerate(names)]


def _critical(recorded: RecordedStep) -> Iterator[Stretch]:
    for piece in recorded.path.pieces:
        recording = recorded.recordings[piece.stage]
        # A row of a stage shows its compute stream only.
        if recording.spans[piece.number].lane == COMPUTE:
            yield piece.stage, recording.begin_s + piece.start_s, recording.begin_s + piece.end_s


def memories_svg(recorded: RecordedStep) -> str:
    """Memory of each stage over the step: constant parts below, changing parts on top, all to one scale."""
    curves, step_s = recorded.curves, recorded.end_s
    # One scale for all stages, so that their rows can be compared.
    highest = max(curve.peak[0] for curve in curves) or 1.0
    shapes, rows = [], memory_rows(recorded)
    for row, curve in zip(rows, curves, strict=True):
        times_s, columns = memory_columns(curve, step_s)
        bottom = row.top + row.height
        # Constant states below the level, changing ones above.
        level = bottom - sum(curve.constant_bytes.values()) / highest * row.height
        upper = [level - sum(parts) / highest * row.height for parts in zip(*columns.values(), strict=True)]
        shapes.append(f'<path fill="var(--m-activations)" d="{staircase(times_s, upper, step_s, bottom)}"/>')
        shapes.append(f'<path fill="var(--m-optimizer)" d="{box(0.0, 1.0, level, bottom - level)}"/>')
    return rows_svg("Memory of every pipeline stage over the step", rows, (0.0, step_s), shapes)


def memory_rows(recorded: RecordedStep) -> list[Row]:
    """Rows of `memories_svg`, named by the stages and their peaks."""
    peaks = [quantity(curve.peak[0], "B") for curve in recorded.curves]
    size = 44 if len(peaks) <= 8 else 26 if len(peaks) <= 24 else 14
    return _rows([f"stage {stage}: {peak}" for stage, peak in enumerate(peaks)], size)
