"""A pipelined step for people: the table of exposed messages and a page, both from one `RecordedStep`."""

from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table

from terrace.plan.plan import AXES
from terrace.report.bars import Bar, Window
from terrace.report.markup import Markup, changes_table, document, html_table, legend, meter, prose, sent_html, tools
from terrace.report.palette import PIPELINE, colour_key
from terrace.report.stage_tables import block_words
from terrace.report.stages_svg import (
    CATEGORIES,
    close_up,
    memories_svg,
    memory_boxes,
    memory_totals,
    stage_bars,
    stage_boxes,
    stages_svg,
    tail_of,
)
from terrace.report.svg import GUTTER, PLOT, memory_columns, memory_svg
from terrace.report.tables import new_table, plan_rows, plan_title, quantity, seconds, time_categories
from terrace.simulate.changes import Change
from terrace.simulate.critical import path_words
from terrace.simulate.recorded import RecordedStep
from terrace.simulate.step import idle_s


def exposed_table(exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float, title: str) -> Table:
    """Seconds of exposed messages: axes down, tiers across."""
    table = new_table(title)
    headings, rows = _exposed_rows(exposed_s, tiers, step_s)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "axis" else "right")
    for row in rows:
        table.add_row(*row)
    return table


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
    sent: Mapping[tuple[str, str], int],
    candidates: Sequence[Change],
    *,
    subtitle: str,
    advice: str,
) -> str:
    """Page of a pipelined step; `sent` is bytes of the rank that sends most, by (message, tier)."""
    cluster, plan, end_s = recorded.step.cluster, recorded.step.plan, recorded.end_s
    bars, least_s = stage_bars(recorded)
    title, tiers = plan_title(cluster, plan), [tier.name for tier in cluster.tiers]
    fullest = recorded.curves[recorded.fullest]
    whole = {"start_s": 0.0, "length_s": end_s, "zooms": True}
    _, columns = memory_columns(fullest, end_s)
    held = sum(fullest.constant_bytes.values())
    # Without merged bars the whole timeline already shows every task.
    nearer, near = _close_up(recorded) if least_s else ("", [])
    charts = [
        _timeline(recorded, bars, (0.0, end_s), zooms=True),
        *near,
        {**whole, "rows": memory_boxes(len(recorded.curves)), "memories": memory_totals(recorded)},
        {**whole, "memory": [round(held + sum(parts)) for parts in zip(*columns.values(), strict=True)]},
    ]
    body = [
        f"<h1>{escape(title)}</h1><p class=quiet>{escape(subtitle)}</p>",
        _figures(recorded),
        f"<div class=lead><p>{prose(path_sentence(recorded))}</p><p>{prose(advice)}</p></div>",
        f"<p class=quiet>{escape(played_words(recorded))}</p>",
        "<h2>Tiers, axes and placements</h2>",
        html_table(*plan_rows(cluster, plan), left=("tier", "states placed here")),
        "<h2>Timeline of all stages</h2>",
        tools(),
        f"<figure><div class=scroll>{stages_svg(recorded, bars)}</div>",
        legend([(name, f"--c-{colour_key(name)}", said) for name, said in _drawn(recorded)], critical=True),
        f"<figcaption>{escape(_caption(least_s))}</figcaption></figure>",
        nearer,
        "<h2>Memory of every stage</h2>",
        f"<figure><div class=scroll>{memories_svg(recorded)}</div>",
        legend([("held throughout", "--m-optimizer", ""), ("comes and goes", "--m-activations", "")]),
        "<figcaption>All rows have one scale, whose top is the highest peak of all stages.</figcaption></figure>",
        f"<h2>Memory of stage {recorded.fullest}, which needs most</h2>",
        f"<figure><div class=scroll>{memory_svg(fullest, end_s, cluster.device.memory_bytes)}</div>",
        legend(_memory_legend(recorded)),
        "</figure>",
        f"<h2>Where the time goes</h2>{_time_table(recorded)}",
        "<div class=columns><div><h2>Messages that nothing hides, busiest stage</h2>",
        f"{html_table(*_exposed_rows(recorded.exposed_s, tiers, recorded.step_s), left=('axis',))}</div>",
        f"<div><h2>Bytes one rank sends</h2>{sent_html(sent, tiers)}</div></div>",
        f"<h2>What one change would do</h2>{changes_table(candidates, recorded.step_s)}",
    ]
    return document(title, "\n".join(body), {"gutter": GUTTER, "plot": PLOT, "charts": charts})


def _timeline(
    recorded: RecordedStep, bars: Mapping[int, Sequence[Bar]], window: Window, zooms: bool
) -> dict[str, object]:
    first_s, length_s = window[0], window[1] - window[0]

    def unit(moment_s: float) -> float:
        return round((moment_s - first_s) / length_s * PLOT, 2)

    rows = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in bars[stage]] for stage in sorted(bars)]
    boxes = stage_boxes(len(recorded.recordings))
    return {"start_s": first_s, "length_s": length_s, "zooms": zooms, "rows": boxes, "bars": rows}


def _close_up(recorded: RecordedStep) -> tuple[str, list[dict[str, object]]]:
    window = close_up(recorded)
    bars, _ = stage_bars(recorded, window)
    text = (
        "<h2>The middle of the step, close up</h2>"
        f"<figure><div class=scroll>{stages_svg(recorded, bars, window)}</div></figure>"
    )
    return text, [_timeline(recorded, bars, window, zooms=False)]


def _figures(recorded: RecordedStep) -> str:
    device, curve = recorded.step.cluster.device, recorded.curves[recorded.fullest]
    exposed = sum(recorded.exposed_s.values()) / recorded.step_s
    figures = [
        (seconds(recorded.step_s), "step"),
        (f"{100 * recorded.prediction.bubble:.1f} %", "of the stages' time idle (bubble)"),
        (f"{100 * exposed:.1f} %", "messages that nothing hides, busiest stage"),
        (quantity(curve.peak[0], "B"), f"on stage {recorded.fullest} at most, of {quantity(device.memory_bytes, 'B')}"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures)
    return f"<div class=figures>{cells}</div>"


def _drawn(recorded: RecordedStep) -> list[tuple[str, str]]:
    kinds = {CATEGORIES[each.instruction.op] for passes in recorded.passes for each in passes}
    tails = {
        piece.category.removeprefix("wait ")
        for stage in range(len(recorded.recordings))
        for piece in tail_of(recorded, stage)
    }
    said = {"weight": "gradient of the weights, put off", "backward": "gradient of the input" * ("weight" in kinds)}
    names = [*(name for name in PIPELINE if name in kinds | tails), *sorted(tails - set(PIPELINE))]
    return [(name, said.get(name, "")) for name in names]


def _caption(least_s: float) -> str:
    words = (
        "A row is a stage: the ranks that hold the same blocks. Waits for data ranks, and messages of tensor and "
        "context ranks, are inside the tasks. Gaps are waiting for other stages."
    )
    return f"{words} Tasks shorter than {seconds(least_s)} that lie close are drawn as one bar." if least_s else words


def _memory_legend(recorded: RecordedStep) -> list[tuple[str, str, str]]:
    curve = recorded.curves[recorded.fullest]
    highest = {**curve.constant_bytes, **{name: max(values) for name, values in curve.varying_bytes.items()}}
    return [(name, f"--m-{name}", quantity(size, "B")) for name, size in highest.items() if size]


def _time_table(recorded: RecordedStep) -> str:
    reports, blocks = recorded.prediction.reports, recorded.step.blocks
    used = {name for report in reports for name, spent in report.time_s.items() if spent > 0}
    names = [name for name in time_categories(dict.fromkeys(used, 1.0)) if name in used]
    rows: list[list[str]] = []
    for program, report in zip(recorded.prediction.programs, reports, strict=True):
        held = " + ".join(block_words(blocks, chunk) for chunk in program.stage.chunks)
        cells = [seconds(report.time_s[name]) if report.time_s.get(name, 0.0) > 0 else "-" for name in names]
        idle = f"{100 * idle_s(report) / report.step_s:.1f} %"
        parts = [(f"--c-{colour_key(name)}", report.time_s.get(name, 0.0)) for name in names]
        rows.append([str(program.stage.index), held, *cells, idle, Markup(meter(parts, report.step_s))])
    return html_table(["stage", "blocks", *names, "bubble", ""], rows, ("blocks", ""))


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
