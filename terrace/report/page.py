"""A simulated step as one self-contained HTML page: no network, no scripts or fonts from elsewhere.

Without the script everything is there; with it one can point at a bar and zoom into the time axis. All words
that come from names (tiers, plans, blocks, clusters) are escaped, in the markup and in the script's data.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from terrace.plan import MessageClass
from terrace.program import StepReport
from terrace.report.bars import Bar, Window, bars_by_lane, middle_unit
from terrace.report.palette import MESSAGES, STREAM, colour_key, colour_variables
from terrace.report.svg import GUTTER, PLOT, memory_columns, memory_svg, row_boxes, timeline_svg
from terrace.report.tables import plan_rows, plan_title, quantity, seconds, time_categories
from terrace.simulate.changes import Change
from terrace.simulate.critical import CriticalPath, critical_words
from terrace.simulate.curve import MemoryCurve
from terrace.simulate.recording import Recording

_INK = {False: "--ink:#191b20;--soft:#555b66;--line:#d9dce2;--faint:#f2f3f6"}
_INK[True] = "--ink:#eceef2;--soft:#a4abb8;--line:#343a45;--faint:#1e222a"
_WORDS = {"grads_full": "full gradients", "params_backward": "secondary", "secondary": "secondary copy"}


class _Markup(str):
    """Text that is HTML already; all other text is escaped."""


def page_html(
    recording: Recording,
    curve: MemoryCurve,
    path: CriticalPath,
    candidates: Sequence[Change],
    *,
    subtitle: str,
    advice: str,
) -> str:
    """Return the page of a recorded step.

    `subtitle` names the model and the batch, `advice` says the best next change (terrace.report.advice).
    """
    program, report = recording.program, recording.report
    title = plan_title(program.cluster, program.plan)
    timelines, charts = _timelines(recording, path)
    has_activations = any(curve.varying_bytes["activations"])
    charts.append(
        {"start_s": 0.0, "length_s": report.step_s, "zooms": True, "memory": _memory_totals(curve, report.step_s)}
    )
    sections = [
        f"<h1>{escape(title)}</h1><p class=quiet>{escape(subtitle)}</p>",
        _figures(recording, curve, path),
        f"<div class=lead><p>{_prose(critical_words(path))}</p><p>{_prose(advice)}</p></div>",
        "<h2>Tiers, axes and placements</h2>",
        _table(*plan_rows(program.cluster, program.plan), left=("tier", "states placed here")),
        timelines,
        "<h2>Memory of one rank over the step</h2>",
        f"<figure><div class=scroll>{memory_svg(curve, report.step_s, program.cluster.device.memory_bytes)}</div>",
        _legend(_memory_legend(curve)),
        f"<figcaption>{_memory_caption(recording, curve, has_activations)}</figcaption></figure>",
        f"<div class=columns><div><h2>Where the time goes</h2>{_time_table(report)}</div>",
        f"<div><h2>Bytes one rank sends, by tier</h2>{_bytes_table(recording)}</div></div>",
        "<h2>What one change would do</h2>",
        _changes_table(candidates, report.step_s),
        f'<p class="quiet foot">Predicted by playing the {len(program.instructions):,} instructions of a rank '
        f"on the cluster's figures. {escape(_sources(recording))}</p>",
    ]
    data = {"gutter": GUTTER, "plot": PLOT, "charts": charts}
    return _document(title, "\n".join(sections), data)


def _timelines(recording: Recording, path: CriticalPath) -> tuple[str, list[dict[str, object]]]:
    """Return the whole step and, where not every span has a bar of its own, one unit close up; and their data."""
    whole = (0.0, recording.report.step_s)
    bars, least_s = bars_by_lane(recording, whole)
    parts = [
        "<h2>Timeline of a steady step</h2>",
        _tools(),
        f"<figure><div class=scroll>{timeline_svg(recording, bars, path, whole, least_s)}</div>",
        _legend([(name, f"--c-{name}", "") for name in _drawn(recording)], critical=True),
        f"<figcaption>{escape(_timeline_caption(least_s))}</figcaption></figure>",
    ]
    charts = [_chart_data(recording, bars, whole, zooms=True)]
    unit = middle_unit(recording)
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
    """What the script needs of a timeline: its window, and per row (top, height) and (start, end, words) of bars."""
    first_s, length_s = window[0], window[1] - window[0]

    def unit(moment_s: float) -> float:
        return round((moment_s - first_s) / (length_s or 1.0) * PLOT, 2)

    rows = [[[unit(bar.start_s), unit(bar.end_s), bar.words] for bar in bars[lane]] for lane in recording.lanes]
    return {"start_s": first_s, "length_s": length_s, "zooms": zooms, "rows": row_boxes(recording.lanes), "bars": rows}


def _document(title: str, body: str, data: Mapping[str, object]) -> str:
    files = resources.files(__package__)
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    light, dark = (f":root{{{_INK[is_dark]};{colour_variables(is_dark)}}}" for is_dark in (False, True))
    themes = f":root{{color-scheme:light dark}}@media not print{{@media (prefers-color-scheme:dark){{{dark}}}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{light}{themes}\n{style}</style></head>\n<body><main>\n{body}\n</main><div id=tip></div>\n"
        f'<script type="application/json" id="data">{_script_json(data)}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _script_json(data: Mapping[str, object]) -> str:
    """JSON that cannot end the script element it stands in."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def _figures(recording: Recording, curve: MemoryCurve, path: CriticalPath) -> str:
    report, device = recording.report, recording.program.cluster.device
    waits = round(100 * path.waits_s / (report.step_s or 1.0))
    figures = [
        (seconds(report.step_s), "step"),
        (f"{waits} %", "of it waiting for messages"),
        (quantity(curve.peak[0], "B"), f"memory at its peak, of {quantity(device.memory_bytes, 'B')}"),
        (quantity(sum(report.sent_bytes.values()), "B"), "sent by a rank"),
    ]
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures)
    return f"<div class=figures>{cells}</div>"


def _prose(words: str) -> str:
    """A number stays on the line of its percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def _tools() -> str:
    words = {"in": "Zoom in", "out": "Zoom out", "left": "Earlier", "right": "Later", "all": "Whole step"}
    return f"<div class=tools>{''.join(f'<button data-act={act}>{word}</button>' for act, word in words.items())}</div>"


def _drawn(recording: Recording) -> list[str]:
    """The colour keys in the timeline, in the palette's order."""
    keys = {colour_key(span.category) for _, span in recording.visible()}
    return [key for key in (*STREAM, *MESSAGES, "other") if key in keys]


def _legend(entries: Iterable[tuple[str, str, str]], critical: bool = False) -> str:
    """Entries are (name, colour property, what is said beside it)."""
    items = [
        f'<li><i style="background:var({colour})"></i>{escape(_WORDS.get(name, name.replace("_", " ")))}'
        f"{f' <span class=quiet>{escape(said)}</span>' if said else ''}</li>"
        for name, colour, said in entries
    ]
    if critical:
        items.append('<li><i class=line style="background:var(--ink)"></i>on the critical path</li>')
    return f"<ul class=legend>{''.join(items)}</ul>"


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


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str], last: str = "") -> str:
    def cells(row: Sequence[str], tag: str) -> str:
        kinds = (" class=words" if heading in left else "" for heading in headings)
        texts = (cell if isinstance(cell, _Markup) else escape(cell) for cell in row)
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(headings, 'th')}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{body}</tbody>{last}</table></div>"


def _meter(parts: Sequence[tuple[str, float]], whole: float) -> _Markup:
    """A bar of parts, each (colour property, size); `whole` is the full width."""
    bars = "".join(
        f'<i style="width:{100 * size / whole:.2f}%;background:var({colour})"></i>' for colour, size in parts if size
    )
    return _Markup(f"<div class=meter><div class=bar>{bars}</div></div>")


def _time_table(report: StepReport) -> str:
    longest = max(report.time_s.values(), default=0.0) or 1.0
    rows = [
        [
            name,
            seconds(report.time_s[name]),
            f"{100 * report.time_s[name] / (report.step_s or 1.0):.1f} %",
            _meter([(f"--c-{colour_key(name)}", report.time_s[name])], longest),
        ]
        for name in time_categories(report.time_s)
    ]
    total = f"<tfoot><tr><td>step</td><td>{seconds(report.step_s)}</td><td></td><td></td></tr></tfoot>"
    return _table(["category", "seconds", "of the step", ""], rows, ["category", ""], total)


def _bytes_table(recording: Recording) -> str:
    sent, tiers = recording.report.sent_bytes, recording.program.layout.tiers
    totals = {tier: sum(size for (_, where), size in sent.items() if where == tier) for tier in tiers}
    largest = max(totals.values(), default=0) or 1
    rows = []
    for tier in reversed(tiers):
        parts = [(message, sent.get((message, tier), 0)) for message in MessageClass]
        named = ", ".join(f"{message.value} {quantity(size, 'B')}" for message, size in parts if size)
        bars = _meter([(f"--c-{message.value}", size) for message, size in parts], largest)
        rows.append([tier, quantity(totals[tier], "B") if totals[tier] else "-", bars, named])
    return _table(["tier", "bytes", "", "messages"], rows, ["tier", "", "messages"])


def _changes_table(candidates: Sequence[Change], step_s: float) -> str:
    if not candidates:
        return "<p>No change of one thing gives a valid plan that fits the device.</p>"
    shortest = candidates[:12]
    rows = [
        [
            change.words,
            change.kind,
            seconds(change.step_s),
            f"{100 * (change.step_s / step_s - 1):+.1f} %" if step_s else "",
            change.note,
        ]
        for change in shortest
    ]
    return _table(["change", "in the", "step", "against now", "and also"], rows, ["change", "in the", "and also"])


def _sources(recording: Recording) -> str:
    cluster = recording.program.cluster
    named = {cluster.device.name: cluster.device.source, **{tier.name: tier.source for tier in cluster.tiers}}
    known = "; ".join(f"{name}: {source}" for name, source in named.items() if source)
    return f"Sources: {known}." if known else ""
