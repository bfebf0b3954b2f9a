"""A simulated step as one self-contained HTML page: no network, no external scripts or fonts.

The page is complete without the script; the script adds tooltips and zoom on the time axis. Names of tiers, plans,
blocks and clusters are escaped, in the markup and in the script's data.
"""

from collections.abc import Mapping, Sequence
from html import escape

from terrace.plan.wire import MessageClass
from terrace.program.report import StepReport
from terrace.report.bars import Bar, Window, bars_by_lane, middle_unit
from terrace.report.markup import changes_table, document, html_table, legend, meter, prose, tools
from terrace.report.palette import MESSAGES, STREAM, colour_key
from terrace.report.svg import GUTTER, PLOT, memory_columns, memory_svg, row_boxes, timeline_svg
from terrace.report.tables import plan_rows, plan_title, quantity, seconds, time_categories
from terrace.simulate.changes import Change
from terrace.simulate.critical import CriticalPath, critical_words
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.recording import Recording


def page_html(
    recording: Recording,
    curve: MemoryCurve,
    path: CriticalPath,
    candidates: Sequence[Change],
    *,
    subtitle: str,
    advice: str,
) -> str:
    """Page of a recorded step.

    `subtitle` names the model and the batch, `advice` is the best next change (terrace.report.advice).
    """
    program, report = recording.program, recording.report
    cluster, plan = program.cluster, program.plan
    title = plan_title(cluster, plan)
    timelines, charts = _timelines(recording, path)
    has_activations = any(curve.varying_bytes["activations"])
    charts.append(
        # In the order of the charts in the markup, by which the script finds them.
        {"start_s": 0.0, "length_s": report.step_s, "zooms": True, "memory": _memory_totals(curve, report.step_s)}
    )
    sections = [
        f"<h1>{escape(title)}</h1><p class=quiet>{escape(subtitle)}</p>",
        _figures(recording, curve, path, sum(report.sent_bytes.values())),
        f"<div class=lead><p>{prose(critical_words(path))}</p><p>{prose(advice)}</p></div>",
        "<h2>Tiers, axes and placements</h2>",
        html_table(*plan_rows(cluster, plan), left=("tier", "states placed here")),
        timelines,
        "<h2>Memory of one rank over the step</h2>",
        f"<figure><div class=scroll>{memory_svg(curve, report.step_s, program.cluster.device.memory_bytes)}</div>",
        legend(_memory_legend(curve)),
        f"<figcaption>{_memory_caption(recording, curve, has_activations)}</figcaption></figure>",
        f"<div class=columns><div><h2>Where the time goes</h2>{_time_table(report)}</div>",
        "<div><h2>Bytes one rank sends, by tier</h2>",
        f"{_bytes_table(recording)}</div></div>",
        "<h2>What one change would do</h2>",
        changes_table(candidates, report.step_s),
        f'<p class="quiet foot">Predicted by playing the {len(program.instructions):,} instructions of a rank '
        f"on the cluster's figures. {escape(_sources(recording))}</p>",
    ]
    data = {"gutter": GUTTER, "plot": PLOT, "charts": charts}
    return document(title, "\n".join(sections), data)


def _timelines(recording: Recording, path: CriticalPath) -> tuple[str, list[dict[str, object]]]:
    whole = (0.0, recording.report.step_s)
    bars, least_s = bars_by_lane(recording, whole)
    parts = [
        "<h2>Timeline of a steady step</h2>",
        tools(),
        f"<figure><div class=scroll>{timeline_svg(recording, bars, path, whole, least_s)}</div>",
        legend([(name, f"--c-{name}", "") for name in _drawn(recording)], critical=True),
        f"<figcaption>{escape(_timeline_caption(least_s))}</figcaption></figure>",
    ]
    charts = [_chart_data(recording, bars, whole, zooms=True)]
    unit = middle_unit(recording)
    # A close-up only where bars were merged, and where there is a smaller unit to show.
    if least_s and unit is not None:
        bars, least_s = bars_by_lane(recording, unit)
        parts += [
            "<h2>The unit of micro-batches in the middle, close up</h2>",
            f"<figure><div class=scroll>{timeline_svg(recording, bars, path, unit, least_s)}</div></figure>",
        ]
        charts.append(_chart_data(recording, bars, unit, zooms=False))
    return "\n".join(parts), charts


def _chart_data(
    recording: Recording, bars: Mapping[int, Sequence[Bar]], window: Window, zooms: bool
) -> dict[str, object]:
    first_s, length_s = window[0], window[1] - window[0]

    def unit(moment_s: float) -> float:
        # Two decimals are far below a pixel, and keep pages small.
        return round((moment_s - first_s) / (length_s or 1.0) * PLOT, 2)

    # In units of the plot, so that the script needs no times to find the bar under the pointer.
    rows = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in bars[lane]] for lane in recording.lanes]
    return {"start_s": first_s, "length_s": length_s, "zooms": zooms, "rows": row_boxes(recording.lanes), "bars": rows}


def _figures(recording: Recording, curve: MemoryCurve, path: CriticalPath, sent_bytes: int) -> str:
    report, device = recording.report, recording.program.cluster.device
    # Waits on the critical path: others are hidden and cost nothing.
    waits = round(100 * path.waits_s / (report.step_s or 1.0))
    figures = [
        (seconds(report.step_s), "step"),
        (f"{waits} %", "of it waiting for messages"),
        (quantity(curve.peak[0], "B"), f"memory at its peak, of {quantity(device.memory_bytes, 'B')}"),
        (quantity(sent_bytes, "B"), "sent by a rank"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures)
    return f"<div class=figures>{cells}</div>"


def _drawn(recording: Recording) -> list[str]:
    keys = {colour_key(span.category) for _, span in recording.visible()}
    return [key for key in (*STREAM, *MESSAGES, "other") if key in keys]


def _timeline_caption(least_s: float) -> str:
    words = (
        "A message stands on the lane of the outermost tier it crosses; what reaches in from the step before is cut."
    )
    if least_s:
        words += (
            f" Spans shorter than {seconds(least_s)} that lie close are drawn as one bar, its height shared out by "
            "category; a trace has each."
        )
    return words


def _memory_legend(curve: MemoryCurve) -> list[tuple[str, str, str]]:
    # Each category at its own peak: the sum may exceed the peak of all.
    highest = {**curve.constant_bytes, **{name: max(values) for name, values in curve.varying_bytes.items()}}
    return [(name, f"--m-{name}", quantity(size, "B")) for name, size in highest.items() if size]


def _memory_caption(recording: Recording, curve: MemoryCurve, has_activations: bool) -> str:
    size, moment_s = curve.peak
    formula = sum(recording.report.memory_bytes.values())
    words = (
        f"Highest at {seconds(moment_s)}: {quantity(size, 'B')}. "
        f"The formula for model state, which assumes the slowest lanes, says {quantity(formula, 'B')}."
    )
    return escape(words if has_activations else f"{words} Without activations.")


def _memory_totals(curve: MemoryCurve, step_s: float) -> list[int]:
    _, values = memory_columns(curve, step_s or 1.0)
    constant = sum(curve.constant_bytes.values())
    return [round(constant + sum(parts)) for parts in zip(*values.values(), strict=True)]


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
        # In one order on every tier, so that the colours of the bars can be compared.
        parts = [(message, sent.get((message, tier), 0)) for message in MessageClass]
        named = ", ".join(f"{message.value} {quantity(size, 'B')}" for message, size in parts if size)
        bars = meter([(f"--c-{message.value}", size) for message, size in parts], largest)
        rows.append([tier, quantity(totals[tier], "B") if totals[tier] else "-", bars, named])
    return html_table(["tier", "bytes", "", "messages"], rows, ["tier", "", "messages"])


def _sources(recording: Recording) -> str:
    cluster = recording.program.cluster
    named = {cluster.device.name: cluster.device.source, **{tier.name: tier.source for tier in cluster.tiers}}
    known = "; ".join(f"{name}: {source}" for name, source in named.items() if source)
    return f"Sources: {known}." if known else ""
