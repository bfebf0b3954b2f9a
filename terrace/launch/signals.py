"""The signals that end a run in order, temporary handlers, and words for how a process ended. Needs no torch."""

import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGINT") if hasattr(signal, name)
)  # Slurm sends SIGUSR1 where a job asks for it


@contextmanager
def handled(signals: Sequence[int], handler: Any) -> Iterator[dict[int, Any]]:
    """Installs `handler` for `signals` in the body; yields the previous handlers. Only in the main thread."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before |= {number: signal.signal(number, handler) for number in signals}
    try:
        yield before
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


def signal_name(number: int) -> str:
    """The name of a signal; a number for real-time signals, which have no names."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def ended_words(code: int) -> str:
    """How a process ended, in words, by its exit code or the negative number of the signal that killed it."""
    if code >= 0:
        return f"exited with code {code}"
    name = signal_name(-code)
    why = ", as the kernel does when memory runs out (dmesg says so)" if name == "SIGKILL" else ""
    return f"was killed by {name}{why}"
