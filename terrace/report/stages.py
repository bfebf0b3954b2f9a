"""Output on a pipelined step: the table of exposed messages and the page, both from one `RecordedStep`."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.table import Table

from terrace.base.printable import escape
from terrace.base.words import quantity, seconds
from terrace.plan.plan import AXES
from terrace.plan.stage import Pass
from terrace.program.recording import COMPUTE
from terrace.report.bars import Bar, Interval, Window, join_bars
from terrace.report.markup import (
    ChartedSection,
    changes_table,
    column,
    figure,
    html_table,
    legend,
    memory_key,
    meter,
    plan_html,
    section,
    step_document,
    timelines,
)
from terrace.report.palette import PIPELINE, colour_key
from terrace.report.stage_tables import block_words
from terrace.report.svg import Row, box, memory_columns, memory_svg, memory_totals, rows_svg, staircase
from terrace.report.tables import new_table, plan_rows, sent_rows, time_categories
from terrace.report.timeline import Stretch, TimelineChart, chart_data, joined
from terrace.simulate.bands import band_of
from terrace.simulate.change import Change
from terrace.simulate.critical import path_words
from terrace.simulate.recorded import RecordedStep
from terrace.simulate.step import WAITS_ON_STAGES, idle_s
from terrace.simulate.timeline_picture import task_spans


def exposed_table(exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float, title: str) -> Table:
    """Seconds of exposed messages by axis (rows) and tier (columns)."""
    headings, rows = _exposed_rows(exposed_s, tiers, step_s)
    return new_table(title, headings, left=("axis",), rows=rows)


def path_sentence(recorded: RecordedStep) -> str:
    """The critical path in words, and how long stages wait for other stages."""
    path, reports = recorded.path, recorded.prediction.reports
    idle = [idle_s(report) / (report.step_s or 1.0) for report in reports]
    # The busiest stage is the one that waits least for others.
    most, least = max(range(len(idle)), key=idle.__getitem__), recorded.prediction.busiest
    return (
        f"{path_words(path.seconds, path.step_s)}. Stages wait for other stages for "
        f"{100 * recorded.prediction.bubble:.1f} % of the step in the mean, stage {most} most "
        f"({100 * idle[most]:.1f} %), stage {least} least ({100 * idle[least]:.1f} %)."
    )


def played_words(recorded: RecordedStep) -> str:
    """How the step was simulated."""
    predicted, micros = recorded.prediction, recorded.step.num_micros
    words = f"Played are the programs of all {len(predicted.programs)} stages, as they run"
    # Long steps are simulated in part and extrapolated linearly.
    if predicted.is_whole:
        return f"{words}."
    return (
        f"{words}, with up to {predicted.played_micros} of the {micros} micro-batches; each further one adds the same. "
        "The timeline shows all of them, and may end some thousandths earlier or later."
    )


def stages_page(
    recorded: RecordedStep,
    sent: Mapping[tuple[Any, str], int],
    candidates: Sequence[Change],
    *,
    subtitle: str,
    advice: str,
    cycle: ChartedSection | None = None,
) -> str:
    """Page of a pipelined step; `sent` are the bytes of the rank that sends most, `cycle` the section on islands."""
    cluster, step_s, end_s = recorded.step.cluster, recorded.step_s, recorded.end_s
    tiers, messages = [tier.name for tier in cluster.tiers], dict.fromkeys(message for message, _ in sent)
    fullest = recorded.curves[recorded.fullest]
    whole = stages_timeline(recorded)
    timeline, charts = timelines(
        whole,
        _entries(whole),
        # Without merged bars the whole timeline already shows every task.
        stages_timeline(recorded, close_up(recorded)) if whole.least_s else None,
        headings=("Timeline of all stages", "The middle of the step, close up"),
        caption="A row is a stage: the ranks that hold the same blocks. Waits for data ranks, and messages of tensor "
        "and context ranks, are inside the tasks. Gaps are waiting for other stages.",
        merged="Tasks shorter than {} that lie close are drawn as one bar",
    )
    # Fewer columns per stage keep pages with many stages small.
    stride = 1 if len(recorded.curves) <= 16 else 3
    charts += [
        chart_data(
            (0.0, end_s),
            rows=[(row.top, row.height) for row in memory_rows(recorded)],
            memories=[memory_totals(curve, end_s)[::stride] for curve in recorded.curves],
        ),
        chart_data((0.0, end_s), memory=memory_totals(fullest, end_s)),
    ]
    charts += [] if cycle is None else [cycle.chart]
    capacity, exposed_s = cluster.device.usable_bytes, sum(recorded.exposed_s.values())
    figures = [
        (seconds(step_s), f"step, {band_of(cluster, recorded.step.plan)}"),
        (f"{100 * recorded.prediction.bubble:.1f} %", "of the stages' time idle (bubble)"),
        (f"{100 * exposed_s / step_s:.1f} %", "messages that nothing hides, busiest stage"),
        (quantity(fullest.peak[0], "B"), f"on stage {recorded.fullest} at most, of {cluster.device.room_words}"),
    ]
    held = legend([("held throughout", "--m-optimizer", ""), ("comes and goes", "--m-activations", "")])
    scale = "All rows have one scale, whose top is the highest peak of all stages."
    sections = [
        f"<p class=quiet>{escape(played_words(recorded))}</p>",
        plan_html(*plan_rows(cluster, recorded.step.plan)),
        timeline,
        section("Memory of every stage", figure(memories_svg(recorded), held, scale)),
        section(
            f"Memory of stage {recorded.fullest}, which needs most",
            figure(memory_svg(fullest, end_s, capacity), memory_key(fullest)),
        ),
        "" if cycle is None else cycle.markup,
        section("Where the time goes", _time_bars(recorded) + _time_table(recorded)),
        "<div class=columns>",
        column(
            "Messages that nothing hides, busiest stage",
            html_table(*_exposed_rows(recorded.exposed_s, tiers, step_s), left=("axis",)),
        ),
        column("Bytes one rank sends", html_table(["message", *tiers], sent_rows(sent, messages, tiers), ("message",))),
        "</div>",
        section("What one change would do", changes_table(candidates, step_s)),
    ]
    sentences = (path_sentence(recorded), advice)
    return step_document(cluster, recorded.step.plan, subtitle, figures, sentences, sections, charts)


def _entries(timeline: TimelineChart) -> list[tuple[str, str, str]]:
    # Messages after a stage's last pass are listed by name, even if they share the colour of unknown categories.
    drawn = timeline.categories
    said = {"weight": "gradient of the weights, put off", "backward": "gradient of the input" * ("weight" in drawn)}
    names = [*(name for name in PIPELINE if name in drawn), *sorted(drawn - set(PIPELINE))]
    return [(name, f"--c-{colour_key(name)}", said.get(name, "")) for name in names]


def _used(recorded: RecordedStep) -> list[str]:
    used = {name for report in recorded.prediction.reports for name, spent in report.time_s.items() if spent > 0}
    return [name for name in time_categories(dict.fromkeys(used, 1.0)) if name in used]


def _time_bars(recorded: RecordedStep) -> str:
    # Above the table, since they would be cut off beside many columns. One scale for all stages.
    names, reports = _used(recorded), recorded.prediction.reports
    longest = max(report.step_s for report in reports)
    rows = (
        f"<span>stage {stage}</span>"
        f"{meter([(f'--c-{colour_key(name)}', report.time_s.get(name, 0.0)) for name in names], longest)}"
        f"<span>{seconds(report.step_s)}</span>"
        for stage, report in enumerate(reports)
    )
    # Waits share a colour.
    named: dict[str, list[str]] = {}
    for name in names:
        named.setdefault(colour_key(name), []).append(name)
    entries = [("waits" if key == "wait" else ", ".join(those), f"--c-{key}", "") for key, those in named.items()]
    return f"<div class=stages>{''.join(rows)}</div>{legend(entries)}"


def _time_table(recorded: RecordedStep) -> str:
    reports, blocks, names = recorded.prediction.reports, recorded.step.blocks, _used(recorded)
    rows: list[list[str]] = []
    for program, report in zip(recorded.prediction.programs, reports, strict=True):
        held = " + ".join(block_words(blocks, chunk) for chunk in program.stage.chunks)
        cells = [seconds(report.time_s[name]) if report.time_s.get(name, 0.0) > 0 else "-" for name in names]
        idle = f"{100 * idle_s(report) / report.step_s:.1f} %"
        rows.append([str(program.stage.index), held, *cells, idle])
    return html_table(["stage", "blocks", *names, "bubble"], rows, ("blocks",))


def _exposed_rows(
    exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for axis in AXES:
        here = [exposed_s.get((axis, tier), 0.0) for tier in tiers]
        # An axis without exposed messages has no row.
        if any(here):
            cells = [f"{seconds(each)}, {100 * each / step_s:.1f} %" if each else "-" for each in here]
            rows.append([axis, *cells, f"{100 * sum(here) / step_s:.1f} %"])
    return ["axis", *tiers, "of the step"], rows


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
    """(bars of each stage, including what follows its last pass; threshold in seconds below which tasks were merged).

    Bars are clipped to the window, by default the whole step.
    """
    first_s, last_s = window or (0.0, recorded.end_s)
    rows: dict[int, list[Interval]] = {}
    named: dict[int, list[str]] = {}
    for stage, program in enumerate(recorded.whole.programs):
        tasks = task_spans(program.stage, recorded.passes[stage])
        drawn = [(span.start_s, span.end_s, _CATEGORIES[span.task.pass_], str(span.task)) for span in tasks]
        drawn += [(start_s, end_s, category, category) for start_s, end_s, category in _tail_of(recorded, stage)]
        named[stage] = [words for *_, words in drawn]
        # Pieces outside the window become empty and are removed below.
        cut = (
            Interval(max(first_s, start_s), min(last_s, end_s), category, number)
            for number, (start_s, end_s, category, _) in enumerate(drawn)
        )
        rows[stage] = [each for each in cut if each.end_s > each.start_s]

    def words(stage: int, key: int) -> str:
        return f"stage {stage}: {named[stage][key]}"

    return join_bars(rows, last_s - first_s, words, MAX_BARS)


def _tail_of(recorded: RecordedStep, stage: int) -> Iterator[tuple[float, float, str]]:
    # (start, end, category) of computation and waits for data ranks after the last pass of a stage.
    recording = recorded.recordings[stage]
    last_s = recorded.passes[stage][-1].end_s - recording.begin_s
    for _, span in recording.visible():
        # The tolerance absorbs rounding; waits for other stages are the bubble, which stays blank.
        if span.lane == COMPUTE and span.end_s > last_s + 1e-12 and span.category not in WAITS_ON_STAGES:
            start_s = recording.begin_s + max(span.start_s, last_s)
            yield start_s, recording.begin_s + span.end_s, span.category.removeprefix("wait ")


def close_up(recorded: RecordedStep) -> Window:
    """A window in the middle of the passes, short enough to distinguish tasks."""
    first_s = min(passes[0].start_s for passes in recorded.passes)
    last_s = max(passes[-1].end_s for passes in recorded.passes)
    stages = (program.stage for program in recorded.whole.programs)
    # The stage with the most tasks determines the width of the window.
    num_tasks = max(sum(len(group.micros) for group in stage.groups) for stage in stages)
    # All stages are busy in the middle; at the ends the pipeline fills and drains.
    middle_s, span_s = (first_s + last_s) / 2, last_s - first_s
    half_s = min(span_s / 2, _CLOSE * span_s / num_tasks / 2)
    return middle_s - half_s, middle_s + half_s


def stages_timeline(recorded: RecordedStep, window: Window | None = None) -> TimelineChart:
    """Timeline of all stages, of the whole step or of a window; tasks on the critical path are underlined."""
    bars, least_s = stage_bars(recorded, window)
    num_stages = len(recorded.recordings)
    # Many rows are drawn less tall.
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
        # Rows show only compute streams.
        if recording.spans[piece.number].lane == COMPUTE:
            yield piece.stage, recording.begin_s + piece.start_s, recording.begin_s + piece.end_s


def memories_svg(recorded: RecordedStep) -> str:
    """Memory of each stage over the step on one scale, with constant parts below and varying parts on top."""
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
    """Rows of `memories_svg`, labelled with stage and peak."""
    peaks = [quantity(curve.peak[0], "B") for curve in recorded.curves]
    size = 44 if len(peaks) <= 8 else 26 if len(peaks) <= 24 else 14
    return _rows([f"stage {stage}: {peak}" for stage, peak in enumerate(peaks)], size)
