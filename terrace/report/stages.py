"""A pipelined step for people: tables and a page, all from one `StagedStep`."""

from collections.abc import Mapping, Sequence
from html import escape

from rich.table import Table

from terrace.plan import AXES
from terrace.planner import plan_of
from terrace.planner.staged import IDLE, StagedStep, path_sentence, played_words
from terrace.report.bars import Bar, Window
from terrace.report.markup import Markup, changes_table, document, html_table, legend, meter, prose, sent_html, tools
from terrace.report.palette import PIPELINE, colour_key
from terrace.report.stages_svg import (
    CATEGORIES,
    close_up,
    memories_svg,
    memory_boxes,
    memory_totals,
    stage_bars,
    stage_boxes,
    stages_svg,
)
from terrace.report.svg import GUTTER, PLOT, memory_columns, memory_svg
from terrace.report.tables import new_table, plan_rows, plan_title, quantity, seconds
from terrace.simulate.changes import Change

_ORDER = ("forward", "backward", "tensor", "context")


def stages_table(step: StagedStep) -> Table:
    """Return the seconds of every stage by category, and its memory."""
    table = new_table("seconds of a step, stage by stage (idle: waiting for other stages)")
    headings, rows = _stage_rows(step)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def exposed_table(exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float, title: str) -> Table:
    """Return the seconds of messages that nothing hides: axes down, tiers across."""
    table = new_table(title)
    headings, rows = _exposed_rows(exposed_s, tiers, step_s)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "axis" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def stages_page(
    step: StagedStep, sent: Mapping[tuple[str, str], int], candidates: Sequence[Change], *, subtitle: str, advice: str
) -> str:
    """Return the page of a pipelined step; `sent` is what a rank sends, by (message, tier)."""
    task, plan = step.task, plan_of(step.task, step.choice)
    bars, least_s = stage_bars(step)
    title, tiers = plan_title(task.cluster, plan), [tier.name for tier in task.cluster.tiers]
    fullest = step.stages[step.fullest]
    whole = {"start_s": 0.0, "length_s": step.step_s, "zooms": True}
    _, columns = memory_columns(fullest.curve, step.step_s)
    held = sum(fullest.curve.constant_bytes.values())
    nearer, near = _close_up(step) if least_s else ("", [])
    charts = [
        _timeline(step, bars, (0.0, step.step_s), zooms=True),
        *near,
        {**whole, "rows": memory_boxes(len(step.stages)), "memories": memory_totals(step)},
        {**whole, "memory": [round(held + value) for value in columns["activations"]]},
    ]
    body = [
        f"<h1>{escape(title)}</h1><p class=quiet>{escape(subtitle)}</p>",
        _figures(step),
        f"<div class=lead><p>{prose(path_sentence(step))}</p><p>{prose(advice)}</p></div>",
        f"<p class=quiet>{escape(' '.join(played_words(step)))}</p>",
        "<h2>Tiers, axes and placements</h2>",
        html_table(*plan_rows(task.cluster, plan), left=("tier", "states placed here")),
        "<h2>Timeline of all stages</h2>",
        tools(),
        f"<figure><div class=scroll>{stages_svg(step, bars)}</div>",
        legend([(name, f"--c-{colour_key(name)}", said) for name, said in _drawn(step)], critical=True),
        f"<figcaption>{escape(_caption(least_s))}</figcaption></figure>",
        nearer,
        "<h2>Memory of every stage</h2>",
        f"<figure><div class=scroll>{memories_svg(step)}</div>",
        legend([("held throughout", "--m-optimizer", ""), ("activations", "--m-activations", "")]),
        "<figcaption>All rows have one scale, whose top is the highest peak of all stages. What a running block takes "
        "on top is counted throughout.</figcaption></figure>",
        f"<h2>Memory of stage {step.fullest}, which needs most</h2>",
        f"<figure><div class=scroll>{memory_svg(fullest.curve, step.step_s, task.cluster.device.memory_bytes)}</div>",
        legend(_memory_legend(step)),
        "</figure>",
        f"<h2>Where the time goes</h2>{_time_table(step)}",
        "<div class=columns><div><h2>Messages that nothing hides, slowest stage</h2>",
        f"{html_table(*_exposed_rows(step.exposed_s, tiers, step.step_s), left=('axis',))}</div>",
        f"<div><h2>Bytes one rank sends</h2>{sent_html(sent, tiers)}</div></div>",
        f"<h2>What one change would do</h2>{changes_table(candidates, step.step_s)}",
    ]
    return document(title, "\n".join(body), {"gutter": GUTTER, "plot": PLOT, "charts": charts})


def _timeline(step: StagedStep, bars: Mapping[int, Sequence[Bar]], window: Window, zooms: bool) -> dict[str, object]:
    """What the script needs of a timeline: its window, and per row (top, height) and (start, end, words) of bars."""
    first_s, length_s = window[0], window[1] - window[0]

    def unit(moment_s: float) -> float:
        return round((moment_s - first_s) / length_s * PLOT, 2)

    rows = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in bars[stage]] for stage in sorted(bars)]
    boxes = stage_boxes(len(step.stages))
    return {"start_s": first_s, "length_s": length_s, "zooms": zooms, "rows": boxes, "bars": rows}


def _close_up(step: StagedStep) -> tuple[str, list[dict[str, object]]]:
    """Return the middle of the step, where the whole joins tasks, and what the script needs of it."""
    window = close_up(step)
    bars, _ = stage_bars(step, window)
    text = (
        "<h2>The middle of the step, close up</h2>"
        f"<figure><div class=scroll>{stages_svg(step, bars, window)}</div></figure>"
    )
    return text, [_timeline(step, bars, window, zooms=False)]


def _figures(step: StagedStep) -> str:
    device, fullest = step.task.cluster.device, step.stages[step.fullest]
    needed = sum(fullest.memory_bytes.values())
    exposed = sum(step.exposed_s.values()) / step.step_s
    figures = [
        (seconds(step.step_s), "step"),
        (f"{100 * step.bubble:.1f} %", "of the stages' time idle (bubble)"),
        (f"{100 * exposed:.1f} %", "messages that nothing hides, slowest stage"),
        (quantity(needed, "B"), f"needed by stage {step.fullest}, of {quantity(device.memory_bytes, 'B')}"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures)
    return f"<div class=figures>{cells}</div>"


def _drawn(step: StagedStep) -> list[tuple[str, str]]:
    """Return (name, what is said beside it) of the colours in the timeline."""
    kinds = {CATEGORIES[task.kind] for tasks in step.timeline.orders.tasks for task in tasks}
    tails = {name.removeprefix("wait ") for stage in step.stages for name, _ in stage.tail}
    said = {"weight": "gradient of the weights, put off", "backward": "gradient of the input" * ("weight" in kinds)}
    names = [*(name for name in PIPELINE if name in kinds | tails), *sorted(tails - set(PIPELINE))]
    return [(name, said.get(name, "")) for name in names]


def _caption(least_s: float) -> str:
    words = (
        "A row is a stage: the ranks that hold the same layers. Waits for data ranks, and messages of tensor and "
        "context ranks, are inside the tasks. Gaps are waiting for other stages."
    )
    return f"{words} Tasks shorter than {seconds(least_s)} that lie close are drawn as one bar." if least_s else words


def _memory_legend(step: StagedStep) -> list[tuple[str, str, str]]:
    curve = step.stages[step.fullest].curve
    highest = {**curve.constant_bytes, **{name: max(values) for name, values in curve.varying_bytes.items()}}
    return [(name, f"--m-{name}", quantity(size, "B")) for name, size in highest.items() if size]


def _names(step: StagedStep) -> list[str]:
    used = dict.fromkeys(name for stage in step.stages for name, value in stage.time_s.items() if value > 0)
    waits = sorted(name for name in used if name.startswith("wait "))
    return [*(name for name in _ORDER if name in used), *waits, "update", IDLE]


def _stage_rows(step: StagedStep) -> tuple[list[str], list[list[str]]]:
    names = _names(step)
    rows = []
    for number, stage in enumerate(step.stages):
        layers = " + ".join(map(str, stage.part.layers))
        ends = "e" * stage.part.embedding + "h" * stage.part.head
        cells = [seconds(stage.time_s[name]) if stage.time_s.get(name) else "-" for name in names]
        idle = f"{100 * stage.time_s[IDLE] / step.step_s:.1f} %"
        memory = quantity(sum(stage.memory_bytes.values()), "B")
        rows.append([str(number), f"{layers} {ends}".strip(), *cells, idle, memory])
    return ["stage", "layers", *names, "idle share", "memory"], rows


def _time_table(step: StagedStep) -> str:
    headings, rows = _stage_rows(step)
    meters = []
    for stage in step.stages:
        parts = [(f"--c-{colour_key(name)}", stage.time_s.get(name, 0.0)) for name in _names(step) if name != IDLE]
        meters.append(meter(parts, step.step_s))
    cells: list[list[str]] = [[*row, Markup(bar)] for row, bar in zip(rows, meters, strict=True)]
    return html_table([*headings, ""], cells, ("layers", ""))


def _exposed_rows(
    exposed_s: Mapping[tuple[str, str], float], tiers: Sequence[str], step_s: float
) -> tuple[list[str], list[list[str]]]:
    rows = []
    for axis in AXES:
        here = [exposed_s.get((axis, tier), 0.0) for tier in tiers]
        if any(here):
            cells = [f"{seconds(each)}, {100 * each / step_s:.1f} %" if each else "-" for each in here]
            rows.append([axis, *cells, f"{100 * sum(here) / step_s:.1f} %"])
    return ["axis", *tiers, "of the step"], rows
