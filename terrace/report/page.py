"""A page as one self-contained HTML file: no network, no external scripts or fonts.

The page is complete without the script, which adds tooltips and zoom. Text is escaped, in the markup and in the
script's data.
"""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby

from terrace.base.printable import escape
from terrace.report.markup import html_table, prose
from terrace.report.palette import colour_variables
from terrace.report.run_curves import curve_data, curve_tiles, drawable
from terrace.report.sections import Page, Section
from terrace.report.svg import GUTTER, PLOT

# Ink on light and on dark paper: text, soft text, rules, faint areas.
_INK = {False: "--ink:#191b20;--soft:#555b66;--line:#d9dce2;--faint:#f2f3f6"}
_INK[True] = "--ink:#eceef2;--soft:#a4abb8;--line:#343a45;--faint:#1e222a"


def page_html(page: Page) -> str:
    charts = [chart.data for section in page.sections for chart in section.charts]
    curves = [curve_data(curve) for section in page.sections for curve in drawable(section.curves)]
    lead = "".join(f"<p>{prose(each)}</p>" for each in page.lead)
    figures = "".join(f"<div><b>{escape(value)}</b><span>{escape(words)}</span></div>" for value, words in page.figures)
    body = [
        f"<h1>{escape(page.title)}</h1><p class=quiet>{escape(page.subtitle)}</p>",
        f"<div class=lead>{lead}</div>" if lead else "",
        f"<div class=figures>{figures}</div>" if figures else "",
    ]
    for is_half, sections in groupby(page.sections, key=lambda section: section.is_half):
        texts = [text for text in map(_section_html, sections) if text]
        body += [f"<div class=columns>{''.join(f'<div>{each}</div>' for each in texts)}</div>"] if is_half else texts
    found = _document(page.title, "\n".join(body), {"charts": charts, "curves": curves})
    # JSON escapes, prompts and folder names may contain lone surrogates, which UTF-8 cannot encode.
    return found.encode(errors="replace").decode()


def _section_html(section: Section) -> str:
    """A section's title and content; empty without content."""
    if section.is_folded:
        text = f"<pre>{escape(''.join(section.words))}</pre>" if any(section.words) else ""
        return f"<details><summary>{escape(section.title)}</summary>{text}</details>" if text else ""
    content = "".join(
        [
            *(chart.figure for chart in section.charts),
            curve_tiles(drawable(section.curves), section.resumed),
            section.body,
            "" if section.table is None else html_table(section.table),
            *(f"<p class=quiet>{prose(each)}</p>" for each in section.words if each),
        ]
    )
    return f"{f'<h2>{escape(section.title)}</h2>' * bool(section.title)}{content}" if content else ""


def _document(title: str, body: str, charts: Mapping[str, Sequence[Mapping[str, object]]]) -> str:
    # Style and script are inlined: a page is one file that works without a network.
    files = resources.files(__package__)
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    light, dark = (f":root{{{_INK[is_dark]};{colour_variables(is_dark)}}}" for is_dark in (False, True))
    # Dark colours apply on screens only: paper is light.
    themes = f":root{{color-scheme:light dark}}@media not print{{@media (prefers-color-scheme:dark){{{dark}}}}}"
    data = json.dumps({"gutter": GUTTER, "plot": PLOT, **charts}, separators=(",", ":"))
    # Without < and &, JSON cannot end the script element around it.
    data = data.replace("<", "\\u003c").replace("&", "\\u0026")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{light}{themes}\n{style}</style></head>\n<body><main>\n{body}\n</main><div id=tip></div>\n"
        f'<script type="application/json" id="data">{data}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )
