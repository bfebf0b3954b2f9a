"""Building blocks of the pages: the document, tables, meters and legends. Text is escaped unless it is `Markup`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import NamedTuple

from terrace.base.printable import escape
from terrace.base.words import quantity, seconds
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.report.palette import MESSAGES, OUTER, STREAM, colour_key, colour_variables
from terrace.report.svg import GUTTER, PLOT
from terrace.report.tables import plan_title
from terrace.report.timeline import TimelineChart
from terrace.simulate.change import Change
from terrace.simulate.curve import MemoryCurve

# Added to a caption if short spans were merged into bars.
MERGED = "Spans shorter than {} that lie close are drawn as one bar, its height shared out by category"

# Ink on light and on dark paper: text, soft text, rules, faint areas.
_INK = {False: "--ink:#191b20;--soft:#555b66;--line:#d9dce2;--faint:#f2f3f6"}
_INK[True] = "--ink:#eceef2;--soft:#a4abb8;--line:#343a45;--faint:#1e222a"
_ZOOMS = {"in": "Zoom in", "out": "Zoom out", "left": "Earlier", "right": "Later", "all": "Whole step"}
_TOOLS = f"<div class=tools>{''.join(f'<button data-act={act}>{word}</button>' for act, word in _ZOOMS.items())}</div>"
_WORDS = {"grads_full": "full gradients", "params_backward": "secondary", "secondary": "secondary copy"}


class Markup(str):
    """Text that is already HTML."""


class ChartedSection(NamedTuple):
    """A section with one chart, as markup and as data for the page's script."""

    markup: str
    chart: dict[str, object]


def document(title: str, sections: Iterable[str], charts: Sequence[Mapping[str, object]], **more: object) -> str:
    """The whole page. `charts` (in markup order) and `more` are data for the page's script."""
    # Style and script are inlined: a page is one file that works without a network.
    files = resources.files(__package__)
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    light, dark = (f":root{{{_INK[is_dark]};{colour_variables(is_dark)}}}" for is_dark in (False, True))
    # Dark colours apply on screens only: paper is light.
    themes = f":root{{color-scheme:light dark}}@media not print{{@media (prefers-color-scheme:dark){{{dark}}}}}"
    body = "\n".join(sections)
    data = json.dumps({"gutter": GUTTER, "plot": PLOT, "charts": charts, **more}, separators=(",", ":"))
    # Without < and &, JSON cannot end the script element around it.
    data = data.replace("<", "\\u003c").replace("&", "\\u0026")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{light}{themes}\n{style}</style></head>\n<body><main>\n{body}\n</main><div id=tip></div>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def step_document(
    cluster: Cluster,
    plan: Plan,
    subtitle: str,
    figures: Iterable[tuple[str, str]],
    sentences: Iterable[str],
    sections: Iterable[str],
    charts: Sequence[Mapping[str, object]],
) -> str:
    """The page of a step: heading, figures, lead `sentences`, then `sections`."""
    title = plan_title(cluster, plan)
    return document(title, [heading(title, subtitle), figures_row(figures), lead(sentences), *sections], charts)


def prose(words: str) -> str:
    """Escaped text with no line break between a number and its percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def heading(title: str, subtitle: str) -> str:
    return f"<h1>{escape(title)}</h1><p class=quiet>{escape(subtitle)}</p>"


def lead(sentences: Iterable[str]) -> str:
    return f"<div class=lead>{''.join(f'<p>{prose(each)}</p>' for each in sentences)}</div>"


def figures_row(figures: Iterable[tuple[str, str]]) -> str:
    """Row of (value, words) below the heading; empty without figures."""
    cells = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in figures)
    return f"<div class=figures>{cells}</div>" if cells else ""


def section(title: str, body: str) -> str:
    """Heading and body; empty without a body."""
    return f"<h2>{title}</h2>{body}" if body else ""


def missing_list(missing: Sequence[str]) -> str:
    """Section with a sentence for each part of a run that could not be read."""
    items = "".join(f"<li>{prose(words)}</li>" for words in missing)
    return section("What is missing", f"<ul class=missing>{items}</ul>" if items else "")


def details(title: str, text: str) -> str:
    """Collapsible text; empty without text."""
    return f"<details><summary>{title}</summary><pre>{escape(text)}</pre></details>" if text else ""


def column(title: str, body: str) -> str:
    return f"<div>{section(title, body)}</div>" if body else ""


def figure(svg: str, key: str = "", caption: str = "") -> str:
    """A chart with its legend and its caption."""
    words = f"<figcaption>{prose(caption)}</figcaption>" if caption else ""
    return f"<figure><div class=scroll>{svg}</div>{key}{words}</figure>"


def plan_html(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Section with the plan's table (`terrace.report.tables.plan_rows`)."""
    return section("Tiers, axes and placements", html_table(headings, rows, left=("tier", "states placed here")))


def timelines(
    whole: TimelineChart,
    entries: Iterable[tuple[str, str, str]],
    near: TimelineChart | None,
    *,
    headings: tuple[str, str],
    caption: str,
    merged: str,
) -> tuple[str, list[dict[str, object]]]:
    """(markup, chart data) of a timeline with zoom buttons, and of a fixed close-up `near`, if given.

    If short spans were merged, `merged` is added to the caption, with the threshold formatted into its braces.
    """
    words = f"{caption} {merged.format(seconds(whole.least_s))}." if whole.least_s else caption
    text = section(headings[0], _TOOLS + figure(whole.svg(), legend(entries, critical=bool(whole.critical)), words))
    if near is None:
        return text, [whole.data()]
    return text + section(headings[1], figure(near.svg())), [whole.data(), near.data(zooms=False)]


def colour_entries(timeline: TimelineChart) -> list[tuple[str, str, str]]:
    """Entries of the legend for the colours of a timeline's bars."""
    keys = {colour_key(category) for category in timeline.categories}
    return [(key, f"--c-{key}", "") for key in (*STREAM, *MESSAGES, *OUTER, "other") if key in keys]


def memory_key(curve: MemoryCurve) -> str:
    """Legend of a memory curve: each category at its own peak, so the sum may exceed the peak of all."""
    highest = {**curve.constant_bytes, **{name: max(values) for name, values in curve.varying_bytes.items()}}
    return legend((name, f"--m-{name}", quantity(size, "B")) for name, size in highest.items() if size)


def legend(entries: Iterable[tuple[str, str, str]], critical: bool = False) -> str:
    """Legend of (name, colour property, remark)."""
    items = [
        f'<li><i style="background:var({colour})"></i>{escape(_words(name))}'
        f"{f' <span class=quiet>{escape(said)}</span>' if said else ''}</li>"
        for name, colour, said in entries
    ]
    if critical:
        items.append('<li><i class=line style="background:var(--ink)"></i>on the critical path</li>')
    return f"<ul class=legend>{''.join(items)}</ul>"


def _words(category: str) -> str:
    # Categories are identifiers. Other names, such as `module.function`, are not changed.
    return _WORDS.get(category, category.replace("_", " ") if category.isidentifier() else category)


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str], last: str = "") -> str:
    """HTML table; columns with a heading in `left` are left-aligned text, `last` is the footer markup."""

    def cells(row: Sequence[str], tag: str) -> str:
        # Numbers are right-aligned, words are not.
        kinds = (" class=words" if heading in left else "" for heading in headings)
        texts = (cell if isinstance(cell, Markup) else escape(cell) for cell in row)
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(headings, 'th')}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{body}</tbody>{last}</table></div>"


def words_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Table of text columns, except `size`, which is numeric; empty without rows."""
    return html_table(headings, rows, [each for each in headings if each != "size"]) if rows else ""


def meter(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """Stacked bar of parts (colour property, size); `whole` is the size of the full width."""
    bars = "".join(
        # In percent of the cell: only the browser knows its width.
        f'<i style="width:{100 * size / whole:.2f}%;background:var({colour})"></i>'
        for colour, size in parts
        if size
    )
    return Markup(f"<div class=meter><div class=bar>{bars}</div></div>")


def changes_table(candidates: Sequence[Change], step_s: float) -> str:
    """Table of the twelve best changes, or a sentence if there are none."""
    if not candidates:
        return "<p>No change of one thing gives a valid plan that fits the device.</p>"
    # Sorted by step time already.
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
    return html_table(["change", "in the", "step", "against now", "and also"], rows, ["change", "in the", "and also"])
