"""Building blocks of the pages: the document, tables, meters and legends. Text is escaped unless it is `Markup`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources

from terrace.report.palette import colour_variables
from terrace.report.tables import quantity, seconds
from terrace.simulate.changes import Change

# Ink on light and on dark paper: text, soft text, rules, faint areas.
_INK = {False: "--ink:#191b20;--soft:#555b66;--line:#d9dce2;--faint:#f2f3f6"}
_INK[True] = "--ink:#eceef2;--soft:#a4abb8;--line:#343a45;--faint:#1e222a"
_WORDS = {"grads_full": "full gradients", "params_backward": "secondary", "secondary": "secondary copy"}


class Markup(str):
    """Text that is already HTML."""


def document(title: str, body: str, data: Mapping[str, object]) -> str:
    """The whole page; `data` is for the page's script."""
    # Style and script are inlined: a page is one file that works without a network.
    files = resources.files(__package__)
    style, script = ((files / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    light, dark = (f":root{{{_INK[is_dark]};{colour_variables(is_dark)}}}" for is_dark in (False, True))
    # Dark colours apply on screens only: paper is light.
    themes = f":root{{color-scheme:light dark}}@media not print{{@media (prefers-color-scheme:dark){{{dark}}}}}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width,initial-scale=1">\n'
        f"<style>{light}{themes}\n{style}</style></head>\n<body><main>\n{body}\n</main><div id=tip></div>\n"
        f'<script type="application/json" id="data">{_script_json(data)}</script>\n'
        f"<script>\n{script}</script></body></html>\n"
    )


def _script_json(data: Mapping[str, object]) -> str:
    # Without < and &, JSON cannot end the script element around it.
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026")


def prose(words: str) -> str:
    """Escaped text with no line break between a number and its percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def tools() -> str:
    words = {"in": "Zoom in", "out": "Zoom out", "left": "Earlier", "right": "Later", "all": "Whole step"}
    return f"<div class=tools>{''.join(f'<button data-act={act}>{word}</button>' for act, word in words.items())}</div>"


def legend(entries: Iterable[tuple[str, str, str]], critical: bool = False) -> str:
    """Legend of (name, colour property, remark)."""
    items = [
        f'<li><i style="background:var({colour})"></i>{escape(_WORDS.get(name, name.replace("_", " ")))}'
        f"{f' <span class=quiet>{escape(said)}</span>' if said else ''}</li>"
        for name, colour, said in entries
    ]
    if critical:
        items.append('<li><i class=line style="background:var(--ink)"></i>on the critical path</li>')
    return f"<ul class=legend>{''.join(items)}</ul>"


def html_table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str], last: str = "") -> str:
    """HTML table; columns with a heading in `left` are text, `last` is the foot."""

    def cells(row: Sequence[str], tag: str) -> str:
        # Numbers are right-aligned, words are not.
        kinds = (" class=words" if heading in left else "" for heading in headings)
        texts = (cell if isinstance(cell, Markup) else escape(cell) for cell in row)
        return "".join(f"<{tag}{kind}>{text}</{tag}>" for kind, text in zip(kinds, texts, strict=True))

    body = "".join(f"<tr>{cells(row, 'td')}</tr>" for row in rows)
    head = f"<thead><tr>{cells(headings, 'th')}</tr></thead>"
    return f"<div class=scroll><table>{head}<tbody>{body}</tbody>{last}</table></div>"


def meter(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """Bar of parts, each (colour property, size); `whole` is the full width."""
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


def sent_html(sent: Mapping[tuple[str, str], int], tiers: Sequence[str]) -> str:
    """Bytes one rank sends per step: messages and axes down, tiers across."""
    rows = [
        [message, *(quantity(sent[message, tier], "B") if sent.get((message, tier)) else "-" for tier in tiers)]
        for message in dict.fromkeys(message for message, _ in sent)
    ]
    return html_table(["message", *tiers], rows, ("message",))
