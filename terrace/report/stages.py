"""A pipelined step for people: the table of exposed messages and a page, both from one `RecordedStep`."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from terrace.base.printable import escape
from terrace.plan.plan import AXES
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
from terrace.report.stages_svg import close_up, memories_svg, memory_rows, stages_timeline
from terrace.report.svg import memory_svg, memory_totals
from terrace.report.tables import new_table, plan_rows, quantity, seconds, sent_rows, time_categories
from terrace.report.timeline import TimelineChart, chart_data
from terrace.simulate.bands import band_of
from terrace.simulate.change import Change
from terrace.simulate.critical import path_words
from terrace.simulate.recorded import RecordedStep
from terrace.simulate.step import idle_s


def exposed_table(exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float, title: str) -> Table:
    """Seconds of exposed messages: axes down, tiers across."""
    headings, rows = _exposed_rows(exposed_s, tiers, step_s)
    return new_table(title, headings, left=("axis",), rows=rows)


def path_sentence(recorded: RecordedStep) -> str:
    """Critical path in words, and how long stages wait for other stages."""
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
    """How the seconds of the step were found."""
    predicted, micros = recorded.prediction, recorded.step.num_micros
    words = f"Played are the programs of all {len(predicted.programs)} stages, as they run"
    # Long steps are simulated in part and continued in a straight line.
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
    """Page of a pipelined step; `sent` is bytes of the rank that sends most, `cycle` the section of islands."""
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
    # Messages behind the last pass of a stage have a name each, also those that share the colour of unknown ones.
    drawn = timeline.categories
    said = {"weight": "gradient of the weights, put off", "backward": "gradient of the input" * ("weight" in drawn)}
    names = [*(name for name in PIPELINE if name in drawn), *sorted(drawn - set(PIPELINE))]
    return [(name, f"--c-{colour_key(name)}", said.get(name, "")) for name in names]


def _used(recorded: RecordedStep) -> list[str]:
    used = {name for report in recorded.prediction.reports for name, spent in report.time_s.items() if spent > 0}
    return [name for name in time_categories(dict.fromkeys(used, 1.0)) if name in used]


def _time_bars(recorded: RecordedStep) -> str:
    # Above the table, as wide as the page: beside many columns they would be cut. One scale for all stages.
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
