"""Standard output that may be closed or in another encoding; and the signal that ends a run.

While a command runs, standard output and error spell out control characters, since most lines hold names from files.
Terrace's own drawing (colours, a line in place) goes to `raw_stream`.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from terrace.base.printable import printable


class Terminated(BaseException):
    """A stop signal arrived; `words` name the checkpoint that is saved, if any.

    Not an `Exception`: no handler on the way out may swallow it.
    """

    def __init__(self, name: str = "SIGTERM", words: str = "saved checkpoints are complete") -> None:
        super().__init__(name, words)
        self.name, self.words = name, words


def drop_stdout() -> None:
    """Redirect standard output to the null device, so that flushing at exit does not fail."""
    with suppress(OSError, ValueError):
        # The descriptor itself, since the interpreter flushes to it at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


class _Spelled:
    def __init__(self, raw: TextIO) -> None:
        self.raw_stream = raw

    def write(self, text: str) -> int:
        return self.raw_stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def raw_stream(stream: TextIO) -> TextIO:
    """The stream below a standard stream of `printable_output`; any other as it is."""
    raw: TextIO = getattr(stream, "raw_stream", stream)
    return raw


def on_a_terminal() -> Callable[[str], None]:
    """A function that shows words on one line of stderr, each call over the last; it does nothing off a terminal."""

    def show(words: str) -> None:
        import shutil  # here, since few commands show progress

        width = shutil.get_terminal_size().columns - 1
        print(f"\r{printable(words)[:width]}", end="\033[K\r", file=raw_stream(sys.stderr), flush=True)

    return show if sys.stderr.isatty() else lambda words: None


@contextmanager
def printable_output() -> Iterator[None]:
    """Inside the block, standard output and error take any text: control characters are spelled out, and characters
    missing in the terminal's encoding are shown as `?`.
    """
    before = sys.stdout, sys.stderr
    for stream in before:
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    out, error = (_Spelled(raw_stream(stream)) for stream in before)
    sys.stdout, sys.stderr = out, error
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


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
