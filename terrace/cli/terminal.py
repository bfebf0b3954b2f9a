"""The console of commands that draw tables: apart from terrace.cli.output, since `terrace --help` needs no rich."""

import sys
from typing import Any, NoReturn

from rich.console import Console
from rich.text import Text

from terrace.base.printable import printable
from terrace.cli.output import raw_stream

_PLAIN_WIDTH = 120  # of a file or a pipe, which have no width


class Terminal(Console):
    """Console that raises `BrokenPipeError` when its reader is gone, where rich would exit.

    Markup is off: names come from files, and may hold brackets and colons.
    """

    def __init__(self, *, stderr: bool = False) -> None:
        file = raw_stream(sys.stderr if stderr else sys.stdout)
        super().__init__(file=file, markup=False, emoji=False, width=None if file.isatty() else _PLAIN_WIDTH)

    def render_str(self, text: str, **options: Any) -> Text:
        """Callback of rich, for every text that is shown."""
        return super().render_str(printable(text), **options)

    def on_broken_pipe(self) -> NoReturn:
        """Callback of rich."""
        raise BrokenPipeError
