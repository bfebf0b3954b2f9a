"""Progress of work before a run: one line that is overwritten on a terminal, ever rarer lines in a file or a pipe."""

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from terrace.base.progress import Passing
from terrace.cli.output import raw_stream

ERASE = "\r\x1b[K"  # the line that the terminal's cursor is in
_FIRST_S, _LATER = 5.0, 3.0  # off a terminal: time of the first line, and the ratio of each line's time to the last's


@contextmanager
def passing_lines(now: Callable[[], float] = time.monotonic) -> Iterator[Callable[[str], None]]:
    """A function that prints messages; on a terminal, `Passing` ones are overwritten, the last when the block ends."""
    raw, live = raw_stream(sys.stdout), sys.stdout.isatty()
    begin_s, next_s, stands = now(), _FIRST_S, False

    def clear() -> None:
        nonlocal stands
        if stands:
            print(ERASE, end="", file=raw, flush=True)
        stands = False

    def show(text: str) -> None:
        nonlocal next_s, stands
        if not isinstance(text, Passing):
            clear()
            print(text, flush=True)
        elif live:
            clear()
            # A line longer than the terminal would wrap, and could not be overwritten.
            print(text[: shutil.get_terminal_size().columns - 1], end="", flush=True)
            stands = True
        elif (spent_s := now() - begin_s) >= next_s:
            print(text, flush=True)
            next_s = _LATER * spent_s

    try:
        yield show
    finally:
        clear()
