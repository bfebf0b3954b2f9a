"""A simulated step as one self-contained HTML page: no network, no external scripts or fonts.

The page is complete without the script; the script adds tooltips and zoom on the time axis. Names of tiers, plans,
blocks and clusters are escaped, in the markup and in the script's data. A pipelined step has its own sections
(terrace.report.stages).
"""

from collections.abc import Sequence

from terrace.base.printable import escape
from terrace.base.words import quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.plan.wire import MessageClass
from terrace.program.recording import COMPUTE, Recording
from terrace.program.report import StepReport
from terrace.report.bars import Window, bars_by_lane, middle_unit
from terrace.report.markup import (
    MERGED,
    ChartedSection,
    changes_table,
    colour_entries,
    column,
    figure,
    html_table,
    memory_key,
    meter,
    plan_html,
    section,
    step_document,
    timelines,
)
from terrace.report.palette import colour_key
from terrace.report.svg import Row, memory_svg, memory_totals
from terrace.report.tables import bytes_words, plan_rows, time_categories
from terrace.report.timeline import TimelineChart, chart_data, joined
from terrace.simulate.bands import band_of
from terrace.simulate.change import Change
from terrace.simulate.critical import CriticalPath, critical_words
from terrace.simulate.curve import MemoryCurve

_COMPUTE_HEIGHT, _LANE_HEIGHT, _GAP = 36, 26, 14


def page_html(
    recording: Recording,
    curve: MemoryCurve,
    path: CriticalPath,
    candidates: Sequence[Change],
    *,
    subtitle: str,
    advice: str,
    cycle: ChartedSection | None = None,
) -> str:
    """Page of a recorded step.

    `subtitle` names the model and the batch, `advice` is the best next change (terrace.report.advice), `cycle`
    the section of a plan with islands.
    """
    program, report = recording.program, recording.report
    cluster, step_s = program.cluster, report.step_s
    whole, unit = lanes_timeline(recording, path), middle_unit(recording)
    # A close-up only where bars were merged, and where there is a smaller unit to show.
    near = lanes_timeline(recording, path, unit) if whole.least_s and unit is not None else None
    timeline, charts = timelines(
        whole,
        colour_entries(whole),
        near,
        headings=("Timeline of a steady step", "The unit of micro-batches in the middle, close up"),
        caption="A message stands on the lane of the outermost tier it crosses; what reaches in from the step before "
        "is cut.",
        merged=f"{MERGED}; a trace has each",
    )
    # In markup order, by which the script assigns data to charts.
    charts.append(chart_data((0.0, step_s), memory=memory_totals(curve, step_s)))
    charts += [] if cycle is None else [cycle.chart]
    # Only waits on the critical path count: others are hidden.
    waits = round(100 * path.waits_s / (step_s or 1.0))
    memory = memory_svg(curve, step_s, cluster.device.usable_bytes)
    sections = [
        plan_html(*plan_rows(cluster, program.plan)),
        timeline,
        section("Memory of one rank over the step", figure(memory, memory_key(curve), _memory_caption(report, curve))),
        "" if cycle is None else cycle.markup,
        "<div class=columns>",
        column("Where the time goes", _time_table(report)),
        column("Bytes one rank sends, by tier", _bytes_table(recording)),
        "</div>",
        section("What one change would do", changes_table(candidates, step_s)),
        f'<p class="quiet foot">Predicted by playing the {len(program.instructions):,} instructions of a rank '
        f"on the cluster's figures. {escape(_sources(cluster))}</p>",
    ]
    figures = [
        (seconds(step_s), f"step, {band_of(cluster, program.plan)}"),
        (f"{waits} %", "of it waiting for messages"),
        (quantity(curve.peak[0], "B"), f"memory at its peak, of {cluster.device.room_words}"),
        (quantity(sum(report.sent_bytes.values()), "B"), "sent by a rank"),
    ]
    return step_document(cluster, program.plan, subtitle, figures, (critical_words(path), advice), sections, charts)


def lanes_timeline(recording: Recording, path: CriticalPath, window: Window | None = None) -> TimelineChart:
    """Timeline of one rank, of the whole step or of a window: the compute stream, then one row per lane."""
    window = window or (0.0, recording.report.step_s)
    bars, least_s = bars_by_lane(recording, window)
    rows, top = [], 4
    for lane in recording.lanes:
        rows.append(Row(recording.lane_name(lane), top, _COMPUTE_HEIGHT if lane == COMPUTE else _LANE_HEIGHT))
        top += rows[-1].height + _GAP
    number_of = {lane: number for number, lane in enumerate(recording.lanes)}
    pieces = ((number_of[recording.spans[each.number].lane], each.start_s, each.end_s) for each in path.pieces)
    return TimelineChart(
        label="Timeline: compute, and a lane for every tier",
        rows=rows,
        bars=[bars[lane] for lane in recording.lanes],
        window=window,
        least_s=least_s,
        critical=joined(pieces, max(least_s, (window[1] - window[0]) / 2000)),
        margin=_GAP,
    )


def _memory_caption(report: StepReport, curve: MemoryCurve) -> str:
    size, moment_s = curve.peak
    words = (
        f"Highest at {seconds(moment_s)}: {quantity(size, 'B')}. The formula for model state, which assumes the "
        f"slowest lanes, says {quantity(sum(report.memory_bytes.values()), 'B')}."
    )
    return words if any(curve.varying_bytes["activations"]) else f"{words} Without activations."


def _time_table(report: StepReport) -> str:
    longest = max(report.time_s.values(), default=0.0) or 1.0
    rows = [
        [
            name,
            seconds(report.time_s[name]),
            f"{100 * report.time_s[name] / (report.step_s or 1.0):.1f} %",
            meter([(f"--c-{colour_key(name)}", report.time_s[name])], longest),
        ]
        for name in time_categories(report.time_s)
    ]
    total = f"<tfoot><tr><td>step</td><td>{seconds(report.step_s)}</td><td></td><td></td></tr></tfoot>"
    return html_table(["category", "seconds", "of the step", ""], rows, ["category", ""], total)


def _bytes_table(recording: Recording) -> str:
    sent, tiers = recording.report.sent_bytes, recording.program.layout.tiers
    totals = {tier: sum(size for (_, where), size in sent.items() if where == tier) for tier in tiers}
    largest = max(totals.values(), default=0) or 1
    rows = []
    # The outermost tier first, since it is the slowest.
    for tier in reversed(tiers):
        # The same order on every tier, so that bars can be compared.
        parts = [(message, sent.get((message, tier), 0)) for message in MessageClass]
        named = ", ".join(f"{message.value} {quantity(size, 'B')}" for message, size in parts if size)
        bars = meter([(f"--c-{message.value}", size) for message, size in parts], largest)
        rows.append([tier, bytes_words(totals[tier]), bars, named])
    return html_table(["tier", "bytes", "", "messages"], rows, ["tier", "", "messages"])


def _sources(cluster: Cluster) -> str:
    named = {cluster.device.name: cluster.device.source, **{tier.name: tier.source for tier in cluster.tiers}}
    known = "; ".join(f"{name}: {source}" for name, source in named.items() if source)
    return f"Sources: {known}." if known else ""
