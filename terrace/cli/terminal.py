"""The console of commands that draw tables: apart from terrace.cli.output, since `terrace --help` needs no rich."""

import re
import shutil
import sys
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from terrace.base.printable import printable
from terrace.cli.output import raw_stream

_PLAIN_WIDTH = 120  # of a file or a pipe, which have no width


class _Trimmed:
    """A stream that gets no blanks before line ends: rich fills every line of a table."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))


class Terminal(Console):
    """Console that raises `BrokenPipeError` when its reader is gone, where rich would exit.

    Off a terminal, lines have COLUMNS characters, by default 120, and no blanks at their ends. Markup is off: names
    come from files, and may hold brackets and colons.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        file = raw_stream(sys.stderr if stderr else sys.stdout)
        if file.isatty():
            super().__init__(file=file, markup=False, emoji=False)
            return
        width = shutil.get_terminal_size((_PLAIN_WIDTH, 24)).columns
        trimmed: Any = _Trimmed(file)
        super().__init__(file=trimmed, markup=False, emoji=False, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Print `objects`; a table that is too wide gets closer columns and whole words in all but its last text."""
        for each in objects:
            if isinstance(each, Table):
                self._fit(each)
        super().print(*objects, **options)

    def _fit(self, table: Table) -> None:
        for column in table.columns:
            column.overflow = "fold"  # never an ellipsis in place of a name
        if Measurement.get(self, self.options.update(width=1 << 16), table).maximum <= self.width:
            return
        table.padding = (0, 0, 0, 0)
        for column in table.columns:
            if isinstance(column.header, str):
                column.header = column.header.replace("-", "-\n")
        texts = [column for column in table.columns if column.justify == "left"]
        kept = [column for column in table.columns if column not in texts[-1:]]
        for column in kept:
            column.no_wrap = True
        if Measurement.get(self, self.options.update(width=1 << 16), table).minimum > self.width:
            for column in kept:
                column.no_wrap = False

    def render_str(self, text: str, **options: Any) -> Text:
        """Callback of rich, for every text that is shown."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Callback of rich."""
        raise BrokenPipeError
