"""Building blocks of the pages: tables, meters, figures and legends. Text is escaped unless it is `Markup`."""

from collections.abc import Iterable, Sequence

from terrace.base.printable import escape
from terrace.report.table import Cell, Markup, Table

_ZOOMS = {"in": "Zoom in", "out": "Zoom out", "left": "Earlier", "right": "Later", "all": "Whole step"}
_LONG = 60  # characters from which a cell counts as a sentence: a guess
TOOLS = f"<div class=tools>{''.join(f'<button data-act={act}>{word}</button>' for act, word in _ZOOMS.items())}</div>"
_WORDS = {"grads_full": "full gradients", "params_backward": "secondary", "secondary": "secondary copy"}


def prose(words: str) -> str:
    """Escaped text with no line break between a number and its percent sign."""
    return escape(words).replace(" %", "&nbsp;%")


def figure(svg: str, key: str = "", caption: str = "") -> str:
    """A chart with its legend and its caption."""
    words = f"<figcaption>{prose(caption)}</figcaption>" if caption else ""
    return f"<figure><div class=scroll>{svg}</div>{key}{words}</figure>"


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


def html_table(table: Table) -> str:
    def cells(row: Sequence[Cell], tag: str) -> str:
        texts = []
        for heading, cell in zip(table.headings, row, strict=True):
            # Numbers are right-aligned, words are not.
            kinds = ["words"] * (heading in table.left)
            # Sentences wrap; names and figures do not, and a table that is too wide scrolls.
            kinds += ["long"] * (not isinstance(cell, Markup) and len(str(cell)) > _LONG)
            kind = f' class="{" ".join(kinds)}"' if kinds else ""
            texts.append(f"<{tag}{kind}>{cell if isinstance(cell, Markup) else escape(str(cell))}</{tag}>")
        return f"<tr>{''.join(texts)}</tr>"

    if not table.rows:
        return ""
    head = f"<thead>{cells(table.headings, 'th')}</thead>"
    body = "".join(cells(row, "td") for row in table.rows if row)
    foot = f"<tfoot>{cells(table.total, 'td')}</tfoot>" if table.total else ""
    return f"<div class=scroll><table>{head}<tbody>{body}</tbody>{foot}</table></div>"


def meter(parts: Sequence[tuple[str, float]], whole: float) -> Markup:
    """Stacked bar of parts (colour property, size); `whole` is the size of the full width."""
    bars = "".join(
        # In percent of the cell: only the browser knows its width.
        f'<i style="width:{100 * size / whole:.2f}%;background:var({colour})"></i>'
        for colour, size in parts
        if size
    )
    return Markup(f"<div class=meter><div class=bar>{bars}</div></div>")
