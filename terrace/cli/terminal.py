"""The console of commands that draw tables. Separate from terrace.cli.output, because `terrace --help`
needs no rich.
"""

import re
import shutil
import sys
from typing import IO, Any, NoReturn

from rich.console import Console
from rich.measure import Measurement
from rich.protocol import rich_cast
from rich.table import Table
from rich.text import Text

from terrace.base.printable import printable
from terrace.cli.output import raw_stream

_PLAIN_WIDTH = 120  # of a file or a pipe, which have no width


class _Trimmed:
    """A stream that strips trailing blanks, with which rich pads every line of a table."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        return self._stream.write(re.sub(r" +(?=\n)", "", text))


class Terminal(Console):
    """Console that raises `BrokenPipeError` if its reader is gone; rich would exit.

    Off a terminal, lines have COLUMNS characters, by default 120, and no trailing blanks. Markup is off: names come
    from files, and may contain brackets and colons.
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
        """Prints `objects`; a table that is too wide is first fitted by `terrace.cli.narrow_tables`."""
        for each in map(rich_cast, objects):
            for shown in self._shown(each) if isinstance(each, Table) else [each]:
                super().print(shown, **options)
        if not objects:
            super().print(**options)

    def _shown(self, table: Table) -> list[Table]:
        for column in table.columns:
            column.overflow = "fold"  # never an ellipsis in place of a name
        wide = Measurement.get(self, self.options.update(width=1 << 16), table).maximum
        if wide <= self.width:
            return [table]
        from terrace.cli.narrow_tables import fitted  # here, since most tables have room

        return fitted(table, self.width)

    def render_str(self, text: str, **options: Any) -> Text:
        """Called by rich for every text that is shown."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Called by rich if the pipe is broken."""
        raise BrokenPipeError
