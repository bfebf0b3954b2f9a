"""A predicted step as sections, for the terminal and for a page: plan, times, bytes, memory, messages, timelines."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrace.base.words import counted, filled, quantity, seconds
from terrace.plan.context import is_context_parallel
from terrace.plan.few_exchanges import few_exchanges
from terrace.plan.plan import AXES
from terrace.program.program import Program
from terrace.program.text import program_text
from terrace.report.cycles import cycle_section, cycle_table, cycle_words
from terrace.report.inside import ASSIGNED, attention_table, inside_table
from terrace.report.markup import legend, meter
from terrace.report.memory import memories_chart, memory_chart
from terrace.report.palette import colour_key
from terrace.report.plans import changes_table
from terrace.report.routing import alternatives_words, division_words, mean_words, routed_table
from terrace.report.sections import Section, timeline_chart
from terrace.report.stage_tables import (
    order_text,
    parts_words,
    stage_bytes_tables,
    stage_memory_table,
    stage_time_table,
    stages_table,
)
from terrace.report.step_view import StepView
from terrace.report.table import Table
from terrace.report.tables import bytes_table, memory_table, plan_table, time_categories, time_table, wire_words
from terrace.simulate.cycle_timeline import cycle_timeline
from terrace.simulate.fullest import worst_words
from terrace.simulate.rows import close_up, step_timeline
from terrace.train.prediction import kept_activations

_MOST_BARS = 2000  # of all stages: a page with many stays below a megabyte
_SAID = {"weight": "gradient of the weights, put off", "backward": "gradient of the input"}


def plan_section(view: StepView) -> list[Section]:
    table, words = plan_table(view.run.cluster, view.run.plan), division_words(view.run.plan)
    return [Section(title="Tiers, axes and placements", table=table, words=[words])]


def blocks_section(view: StepView) -> list[Section]:
    if not view.is_pipelined:
        return []
    blocks = view.run.blocks()
    table, words = stages_table(view.programs, blocks), parts_words(view.programs, blocks)
    return [Section(title="Stages", table=table, words=words.splitlines())]


def memory_section(view: StepView) -> list[Section]:
    """Model state of a rank, of each stage, and of the busiest experts."""
    room = view.run.cluster.device.room_words
    held = [report.memory_bytes for report in view.predicted.reports]
    if view.is_pipelined:
        table = stage_memory_table(held, [kept_activations(view.run, program) for program in view.programs], room)
    else:
        table = memory_table(held[0], room)
    words = worst_words(view.job, view.run.blocks(), view.run.train.sequence)
    return [Section(title="Model state of one rank", table=table, words=[words])]


def bytes_section(view: StepView) -> list[Section]:
    tiers, sent, run = view.programs[0].layout.tiers, view.predicted.expected_bytes, view.run
    tables = stage_bytes_tables(sent, tiers) if view.is_pipelined else [bytes_table(sent[0], tiers)]
    words = [mean_words(view.programs[0]), wire_words(view.programs[0].plan)]
    words.append(few_exchanges(run.cluster, run.plan, run.train.steps))
    return [*(Section(title="Bytes one rank sends", table=table) for table in tables), Section(words=words)]


def inside_section(view: StepView) -> list[Section]:
    program, found = view.programs[view.stage], list[Section]()
    if program.model.tensor.degree > 1:
        found.append(Section(title="Messages inside the blocks", table=inside_table(program)))
    if is_context_parallel(program.mesh, program.plan):
        # These messages depend on the documents of each batch, so the plan alone does not determine them.
        if program.plan.balance == "cost":
            found.append(Section(words=[] if view.lengths else [ASSIGNED]))
        else:
            found.append(Section(title="Attention over the context axis", table=attention_table(program)))
    return [*found, Section(title="Routed messages", table=routed_table(program))]


def time_section(view: StepView) -> list[Section]:
    reports, band = view.predicted.reports, view.band
    words = [filled(f"predicted step {seconds(view.predicted.step_s)} {band}: {band.words}")]
    if view.is_pipelined:
        bars, table = _stage_bars(view), stage_time_table(reports)
        return [Section(title="Where the time goes", body=bars, table=table, words=words)]
    return [Section(title="Where the time goes", table=time_table(reports[0]), words=words)]


def _stage_bars(view: StepView) -> str:
    """A bar for each stage on one scale, as wide as the page; waits share a colour."""
    reports = view.predicted.reports
    used = {name: 1.0 for report in reports for name, spent in report.time_s.items() if spent > 0}
    names, longest = time_categories(used), max(report.step_s for report in reports)
    rows = []
    for stage, report in enumerate(reports):
        bar = meter([(f"--c-{colour_key(name)}", report.time_s.get(name, 0.0)) for name in names], longest)
        rows.append(f"<span>stage {stage}</span>{bar}<span>{seconds(report.step_s)}</span>")
    named: dict[str, list[str]] = {}
    for name in names:
        named.setdefault(colour_key(name), []).append(name)
    entries = [("waits" if key == "wait" else ", ".join(own), f"--c-{key}", "") for key, own in named.items()]
    return f"<div class=stages>{''.join(rows)}</div>{legend(entries)}"


def alternatives_section(view: StepView) -> list[Section]:
    """Predicted steps of other divisions of experts."""
    return [Section(words=[alternatives_words(view.predicted)])]


def cycle_sections(view: StepView) -> list[Section]:
    """The steps of a cycle of islands, and how much of their exchanges is hidden."""
    cycle = view.predicted.cycle
    if cycle is None:
        return []
    words = cycle_words(cycle, view.hiding)
    return [
        Section(title="The steps of the cycle", table=cycle_table(cycle)),
        cycle_section(cycle_timeline(cycle), words),
    ]


def exposed_section(view: StepView) -> list[Section]:
    """Messages that nothing hides, by axis and tier, and those that the step relies on hiding."""
    which = f"stage {view.predicted.busiest}, the busiest" if view.is_pipelined else "no pipeline, so no bubble"
    tiers, title = view.programs[0].layout.tiers, f"messages that nothing hides ({which})"
    table = exposed_table(view.recorded.exposed_s, tiers, view.recorded.step_s, title)
    return [Section(title=title.capitalize(), table=table, words=[view.hidden])]


def exposed_table(exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float, title: str) -> Table:
    """Seconds of exposed messages by axis (rows) and tier (columns)."""
    table = Table(title=title, headings=["axis", *tiers, "of the step"], left=("axis",))
    for axis in AXES:
        here = [exposed_s.get((axis, tier), 0.0) for tier in tiers]
        # An axis without exposed messages has no row.
        if any(here):
            cells = [f"{seconds(each)}, {100 * each / step_s:.1f} %" if each else "-" for each in here]
            table.add_row(axis, *cells, f"{100 * sum(here) / step_s:.1f} %")
    return table


def order_section(view: StepView) -> list[Section]:
    """The task order of each stage, as a list and over time."""
    if not view.is_pipelined:
        return []
    title = f"Schedule {view.orders.schedule}: the tasks of every stage in order"
    key = "a cell: virtual stage, F forward, B backward or its halves I input and W weight, micro-batch"
    order = Section(title=title, text=lambda width: f"{key}\n{order_text(view.orders, width)}")
    return [order, *timeline_section(view)]


def timeline_section(view: StepView) -> list[Section]:
    timeline = step_timeline(view.recorded)
    most = _MOST_BARS if view.is_pipelined else _MOST_BARS // 2
    caption = (
        "A message stands on the lane of the outermost tier it crosses; what reaches in from the step before is cut."
    )
    if view.is_pipelined:
        caption = (
            "A row is a stage: the ranks that hold the same blocks. Waits for data ranks, and messages of tensor and "
            "context ranks, are inside the tasks. Gaps are waiting for other stages."
        )
    said = _SAID if "weight" in timeline.categories else {}
    chart = timeline_chart(timeline, caption=caption, most=most, said=said)
    sections = [Section(title=timeline.title, charts=[chart])]
    # Where no bars were merged, the whole timeline shows every span already.
    if chart.is_merged:
        near = timeline_chart(close_up(timeline), zooms=False, most=most)
        sections.append(Section(title="The middle of the step, close up", charts=[replace(near, text=None)]))
    return sections


def memory_over_time_section(view: StepView) -> list[Section]:
    """Memory over the step: of all stages on one scale, and of the one that needs most by category."""
    recorded, cluster = view.recorded, view.run.cluster
    fullest = recorded.curves[recorded.fullest]
    size, moment_s = fullest.peak
    of_stage = f" (stage {recorded.fullest})" if view.is_pipelined else ""
    words = (
        f"over the step, memory is highest at {seconds(moment_s)}{of_stage}: {quantity(size, 'B')}{_without(view)}, "
        "without the device's context and what its allocator loses, which terrace plan adds"
    )
    sections = []
    if view.is_pipelined:
        chart = memories_chart(recorded.curves, recorded.end_s)
        sections.append(Section(title="Memory of every stage", charts=[chart]))
    chart = memory_chart(fullest, recorded.end_s, cluster.device.usable_bytes)
    title = f"Memory of stage {recorded.fullest}, which needs most" if view.is_pipelined else "Memory of one rank"
    return [*sections, Section(title=title, charts=[chart], words=[words])]


def _without(view: StepView) -> str:
    return " with activations" if any(view.recorded.curves[0].varying_bytes["activations"]) else " without activations"


def misfit_section(view: StepView) -> list[Section]:
    return [Section(words=[view.misfit])]


def advice_section(view: StepView) -> list[Section]:
    """The critical path and the best next change."""
    words = [view.path_words, view.advice]
    if view.is_pipelined:
        predicted = view.predicted
        step = f"step {seconds(predicted.step_s)} {view.band}"
        words = [f"{step}; bubble {100 * predicted.bubble:.1f} % of the stages' time", *words, view.played_words]
    return [Section(words=["\n".join(words)])]


def changes_section(view: StepView) -> list[Section]:
    """The twelve best changes of one thing, shortest step first."""
    table = changes_table(view.candidates[:12], view.recorded.step_s, ("change", "against now", "and also"))
    nothing = "No change of one thing gives a valid plan that fits the device."
    return [Section(title="What one change would do", table=table, words=[] if table.rows else [nothing])]


def program_section(view: StepView) -> list[Section]:
    program: Program = view.programs[view.stage]
    whose = f"every rank of stage {view.stage}" if view.is_pipelined else "every rank"
    title = f"program of {whose}, {counted(view.run.num_micros(), 'micro-batch')}:"
    verified = f"verified: {len(program.instructions)} instructions keep every rule of the instruction set"
    return [Section(title=title, text=lambda _: f"{program_text(program, max_lines=view.lines)}\n\n{verified}")]
