"""A pipe by which the main thread, and signals to the process, wake a sleeping thread."""

import os
import select
import signal
from contextlib import suppress
from typing import Any, Self


class WakePipe:
    """Context manager. With `hears_signals` the pipe receives the numbers of signals, which needs the main thread.

    `delays_sigterm` also keeps SIGTERM from ending the process; without it, another handler must be installed.
    """

    def __init__(self, *, hears_signals: bool, delays_sigterm: bool) -> None:
        self._hears_signals, self._delays_sigterm = hears_signals, delays_sigterm

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        if self._hears_signals:
            # The C-level handler writes the signal's number to the pipe even while the main thread is inside a
            # collective. It needs a Python handler to be installed, which has nothing to do.
            self._old_handler: Any = signal.getsignal(signal.SIGTERM)
            if self._delays_sigterm:
                signal.signal(signal.SIGTERM, lambda *_: None)
            self._old_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        """Restores the previous signal handlers. Call `close` once no thread sleeps any more."""
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
        """Sleeps until woken, at most `duration_s`. Returns the bytes in the pipe, signal numbers among them."""
        return os.read(self._read, 4096) if select.select([self._read], [], [], duration_s)[0] else b""
