"""The pipe by which the main thread, and signals to the process, wake a thread that sleeps."""

import os
import select
import signal
from contextlib import suppress
from typing import Any, Self


class WakePipe:
    """A context manager. With `hears_signals` it gets the numbers of signals, which needs the main thread.

    `delays_sigterm` also keeps SIGTERM from ending the process; without it, another handler is in place.
    """

    def __init__(self, *, hears_signals: bool, delays_sigterm: bool) -> None:
        self._hears_signals, self._delays_sigterm = hears_signals, delays_sigterm

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        if self._hears_signals:
            # The C-level handler writes the signal's number to the pipe even while the main thread is inside a
            # collective; a Python handler must exist for that, and has nothing to do.
            self._old_handler: Any = signal.getsignal(signal.SIGTERM)
            if self._delays_sigterm:
                signal.signal(signal.SIGTERM, lambda *_: None)
            self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """Gives signals back to their handlers before; `close` follows once nobody sleeps."""
        if self._hears_signals:
            signal.set_wakeup_fd(self._old_wakeup)
            signal.signal(signal.SIGTERM, self._old_handler)

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def wake(self) -> None:
        # A full pipe wakes the thread just as well.
        with suppress(BlockingIOError):
            os.write(self._write, b"\0")

    def sleep(self, duration_s: float) -> bytes:
        """Sleeps until it is woken, at most `duration_s`; the numbers of the signals that came, among others."""
        return os.read(self._read, 4096) if select.select([self._read], [], [], duration_s)[0] else b""
