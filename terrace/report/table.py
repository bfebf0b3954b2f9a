"""A table as a value: rich draws it on a terminal, terrace.report.markup on a page."""

from collections.abc import Container, Iterable, Sequence

from rich import box
from rich.table import Table as RichTable
from rich.text import Text

_WIDTH = 80  # of a terminal; longer titles are wrapped


class Markup(str):
    """Text that is already HTML; a column of it, such as bars, is on pages alone."""


Cell = str | Text


class Table:
    """Rows of cells. Columns with a heading in `left` are text, all others numbers.

    An empty row is a line between the rows around it; `total` stands below a line. The title is for the terminal: on a
    page the section has one.
    """

    def __init__(
        self,
        *,
        headings: Sequence[str],
        title: str = "",
        rows: Iterable[Sequence[Cell]] = (),
        left: Container[str] = (),
        total: Sequence[Cell] = (),
    ) -> None:
        self.title, self.headings, self.left, self.total = title, headings, left, total
        self.rows = list(rows)

    def add_row(self, *cells: Cell) -> None:
        self.rows.append(cells)

    def add_section(self) -> None:
        """Add a line below the rows so far."""
        self.rows.append(())

    def __rich__(self) -> RichTable:
        width = min(len(self.title) + 2, _WIDTH)  # a narrower table would break its title into lines
        found = RichTable(
            title=self.title or None,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            min_width=width,
        )
        shown = [place for place in range(len(self.headings)) if not self._is_markup(place)]
        for place in shown:
            heading = self.headings[place]
            found.add_column(heading, justify="left" if heading in self.left else "right")
        for row in self.rows:
            if row:
                found.add_row(*(row[place] for place in shown))
            else:
                found.add_section()
        if self.total:
            found.add_section()
            found.add_row(*(self.total[place] for place in shown))
        return found

    def _is_markup(self, place: int) -> bool:
        return any(isinstance(row[place], Markup) for row in self.rows if row)
