"""Fits tables wider than the screen: columns move closer, text wraps, and columns without room go into a table below.

Numbers are never cut. A cell of a right-aligned column stays on one line, or breaks after a comma. Columns without room
are put in a further table below, together with the columns that name its rows. If even that is too wide, words are
broken.
"""

import copy
import re
from collections.abc import Sequence
from itertools import takewhile

from rich.cells import cell_len
from rich.table import Column, Table
from rich.text import Text

_READABLE = 16  # characters of a text for which other columns are narrowed first

# Parts between which a line may break: of texts, of figures, of headings.
_WORDS, _FIGURES, _HEADINGS = (re.compile(each) for each in (r"\s*\S+\s*", r".+?(?:, |$)", r"[^\s-]+-?\s*|-\s*"))


def fitted(table: Table, width: int) -> list[Table]:
    """The tables to print in place of one wider than `width`. Cells are strings or `Text`."""
    columns = [_Measured(column) for column in table.columns if any(map(_lines, column.cells))]
    if not columns:
        return [table]
    names = _names(columns, width)
    groups, rest = list[list[_Measured]](), columns[len(names) :]
    if _width(columns, 2) <= width:
        groups, rest = [columns], []
    while rest or not groups:
        shown = list(names)
        # At least one column: if even that is too wide, words are broken.
        while rest and (len(shown) == len(names) or _width([*shown, rest[0]], 1) <= width):
            shown.append(rest.pop(0))
        groups.append(shown)
    return [_table(table, group, len(names), width, is_first=number == 0) for number, group in enumerate(groups)]


class _Measured:
    """A column and its widths: `whole` is unwrapped; `floors` are the minimum with a wrapped heading, with readable
    cells, and with everything wrapped.
    """

    def __init__(self, column: Column) -> None:
        self.column, self.cells = column, list(column.cells)
        self.is_text = column.justify == "left"
        self.heading = _lines(column.header)
        self.breaks = _WORDS if self.is_text else _FIGURES
        lines = [line for cell in self.cells for line in _lines(cell)]
        cells, least = _longest(lines), _longest([part for line in lines for part in self.breaks.findall(line)])
        heading = _longest([part for line in self.heading for part in _HEADINGS.findall(line)])
        readable = min(cells, max(least, _READABLE)) if self.is_text else cells
        self.whole = max(cells, _longest(self.heading))
        self.floors = max(heading, cells), max(heading, readable), max(heading, least)


def _lines(cell: object) -> list[str]:
    return (cell.plain if isinstance(cell, Text) else str(cell)).splitlines()


def _longest(lines: Sequence[str]) -> int:
    return max((cell_len(line.rstrip()) for line in lines), default=0)


def _names(columns: Sequence[_Measured], width: int) -> list[_Measured]:
    """The columns that name the rows: the first, and following text columns if it is text, within half of the width."""
    texts = list(takewhile(lambda column: column.is_text, columns[:-1]))
    while len(texts) > 1 and _width(texts, 1) > width // 2:
        texts.pop()
    return texts or list(columns[:1])


def _width(columns: Sequence[_Measured], floor: int) -> int:
    # A blank at both edges and between columns.
    return sum(column.floors[floor] for column in columns) + len(columns) + 1


def _widths(columns: Sequence[_Measured], width: int) -> list[int]:
    """A width for each column. Headings wrap first, then the last text column, then the others."""
    room, widths = width - len(columns) - 1, [column.whole for column in columns]
    every = range(len(columns))
    last = [place for place in every if columns[place].is_text][-1:]
    for floor, places in ((0, every), (1, last), (1, every), (2, last), (2, every)):
        while sum(widths) > room:
            wider = [place for place in places if widths[place] > columns[place].floors[floor]]
            if not wider:
                break
            widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _table(table: Table, columns: Sequence[_Measured], num_names: int, width: int, *, is_first: bool) -> Table:
    """A table of some of the columns. All but the first table lack the title, and rows whose other cells are empty."""
    found = copy.copy(table)
    found.columns, found.rows, found.padding = [], [], (0, 0, 0, 0)
    found.title = table.title if is_first else None
    found.min_width = min(table.min_width or 0, width) if is_first else None
    widths = _widths(columns, width)
    for number, (each, wide) in enumerate(zip(columns, widths, strict=True)):
        made = each.column.copy()
        made.header = _broken(each.heading, _HEADINGS, wide)
        # Folded: a word wider than its column continues on the next line.
        made.width, made.no_wrap, made.overflow, made._index = wide, False, "fold", number
        found.columns.append(made)
    for place, row in enumerate(table.rows):
        cells = [
            _broken(_lines(each.cells[place]), each.breaks, wide)
            if isinstance(each.cells[place], str)
            else each.cells[place]
            for each, wide in zip(columns, widths, strict=True)
        ]
        if is_first or any(map(_lines, cells[num_names:])):
            found.add_row(*cells, style=row.style, end_section=row.end_section)
        elif row.end_section:
            found.add_section()
    return found


def _broken(lines: Sequence[str], breaks: re.Pattern[str], width: int) -> str:
    """`lines` wrapped to `width`, only at matches of `breaks`."""
    found = list[str]()
    for line in lines:
        now = ""
        for part in breaks.findall(line):
            if now and cell_len((now + part).rstrip()) > width:
                found.append(now.rstrip())
                now = ""
            now += part
        found.append(now.rstrip())
    return "\n".join(found)
