"""Standard output that may be closed, narrow or in another encoding; and the signal that ends a run."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import NoReturn

from rich.console import Console

_PLAIN_WIDTH = 120  # of a file or a pipe, which have no width


class Terminated(BaseException):
    """SIGTERM arrived, or the signal in the message. Not an `Exception`: no handler on the way out may swallow it."""


class Terminal(Console):
    """Console that raises `BrokenPipeError` when its reader is gone, where rich would exit.

    Markup is off: names come from files, and may hold brackets and colons.
    """

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)

    def on_broken_pipe(self) -> NoReturn:
        """Callback of rich."""
        raise BrokenPipeError


def drop_stdout() -> None:
    """Redirect standard output to the null device, so that flushing at exit does not fail."""
    with suppress(OSError, ValueError):
        # The descriptor itself, since the interpreter flushes to it at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def replace_unprintable() -> None:
    """Print `?` for characters missing in the terminal's encoding, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into `Terminated` inside the block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        # Once: the way out must not be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        # The caller's handler comes back, also after an exception.
        signal.signal(signal.SIGTERM, before)
