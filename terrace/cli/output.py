"""Makes standard output robust: closed, full, or in another encoding; also turns SIGTERM into an exception.

While a command runs, standard output and error show control characters in escaped form, since most lines hold names
from files. Terrace's own drawing (colours, a line in place) goes to `raw_stream`.

If standard output cannot be written (a full disk, a descriptor that the caller closed), the command ends with a
one-line error, unless it has called `outlive_output`: hours of training are worth more than their screen. Errors on
standard error are ignored, since there is nowhere left to report them. If the reader of standard output is gone (`|
head`), `BrokenPipeError` is raised.
"""

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from typing import Any, TextIO

from terrace.base.errors import TerraceError
from terrace.base.printable import printable


class Terminated(BaseException):
    """A stop signal arrived. `words` name the saved checkpoint, if any.

    Not an `Exception`, so that no handler on the way out swallows it.
    """

    def __init__(self, name: str = "SIGTERM", words: str = "saved checkpoints are complete") -> None:
        super().__init__(name, words)
        self.name, self.words = name, words


class OutputError(TerraceError):
    """Standard output cannot be written, and the command has nothing else to show."""


def _drop(stream: Any) -> None:
    with suppress(OSError, ValueError, AttributeError):
        # The descriptor itself, since the interpreter flushes to it at exit.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _Guarded:
    # A standard stream, None if the caller has closed it. `lost` is called on the first failure only.
    def __init__(self, stream: TextIO | None, lost: Callable[[OSError], None]) -> None:
        self.whole: TextIO = stream or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # as long as the process
        self.lost = lost
        self.failure: OSError | None = None
        self._is_closed = stream is None

    def write(self, text: str) -> int:
        if self._is_closed and text:
            self._lose(OSError(errno.EBADF, "it is closed"))
        else:
            self._done(lambda: self.whole.write(text))
        return len(text)

    def flush(self) -> None:
        self._done(self.whole.flush)

    def _done(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self._lose(error)

    def _lose(self, error: OSError) -> None:
        if self.failure is not None:
            return
        self.failure = error
        # What is left in the buffer goes there, too, so that the interpreter's flush at exit does not fail.
        _drop(self.whole)
        self.lost(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.whole, name)


def _ends_the_command(error: OSError) -> None:
    if isinstance(error, BrokenPipeError):
        raise error
    raise OutputError(
        f"cannot write standard output: {error.strerror}: send it to a file on a disk with room, or to a program"
    )


def outlive_output(say: Callable[[str], None]) -> None:
    """From now on the command continues if standard output cannot be written; `say` gets one line about it.

    A closed pipe still ends the command: the reader wanted no more.
    """
    guard = raw_stream(sys.stdout)
    if not isinstance(guard, _Guarded):
        return

    def lost(error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise error
        say(f"standard output cannot be written ({error.strerror}): the run goes on without its screen")

    guard.lost = lost
    if guard.failure is not None:
        lost(guard.failure)


class _Spelled:
    def __init__(self, raw: _Guarded) -> None:
        self.raw_stream = raw

    def write(self, text: str) -> int:
        return self.raw_stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw_stream, name)


def raw_stream(stream: Any) -> Any:
    """The original stream below a `printable_output` stream; other streams are returned unchanged."""
    raw: Any = getattr(stream, "raw_stream", stream)
    return raw


def on_a_terminal() -> Callable[[str], None]:
    """A function that shows text on one line of stderr, each call replacing the last; does nothing off a terminal."""

    def show(words: str) -> None:
        import shutil  # here, since few commands show progress

        width = shutil.get_terminal_size().columns - 1
        print(f"\r{printable(words)[:width]}", end="\033[K\r", file=raw_stream(sys.stderr), flush=True)

    return show if sys.stderr.isatty() else lambda words: None


@contextmanager
def printable_output() -> Iterator[None]:
    """Makes standard output and error accept any text in the body: control characters are escaped, and characters
    missing in the terminal's encoding become `?`.
    """
    before = sys.stdout, sys.stderr
    for number in range(3):
        _occupy(number)
    guards = [_guarded(sys.stdout, _ends_the_command), _guarded(sys.stderr, lambda error: None)]
    for guard in guards:
        if isinstance(guard.whole, TextIOWrapper):
            guard.whole.reconfigure(errors="replace")
    out, error = map(_Spelled, guards)
    sys.stdout, sys.stderr = out, error
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
        for stream, guard in zip(before, guards, strict=True):
            if raw_stream(stream) is not guard:  # the outermost block
                guard.lost = lambda error: None
                guard.flush()


def _guarded(stream: Any, lost: Callable[[OSError], None]) -> _Guarded:
    raw = raw_stream(stream)
    return raw if isinstance(raw, _Guarded) else _Guarded(raw, lost)


def _occupy(descriptor: int) -> None:
    # A file that is opened takes the lowest free descriptor, and lines of C libraries would go into it.
    try:
        os.fstat(descriptor)
    except OSError:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turns SIGTERM into `Terminated` inside the block; does nothing outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(*_: object) -> None:
        # Only once: the shutdown must not be interrupted.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Terminated

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        # The caller's handler is restored, also after an exception.
        signal.signal(signal.SIGTERM, before)
