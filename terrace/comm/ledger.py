"""Counters of bytes sent and bytes held."""

import threading
from collections import defaultdict

from terrace.plan.wire import MessageClass


class Ledger:
    """Bytes this rank sent, per (message class, tier). Thread-safe: lanes add from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sent: dict[tuple[MessageClass, str], int] = defaultdict(int)
        self._again: dict[tuple[MessageClass, str], int] = defaultdict(int)

    def add(self, message: MessageClass, tier: str, num_bytes: int) -> None:
        with self._lock:
            self._sent[message, tier] += num_bytes

    def add_again(self, message: MessageClass, tier: str, num_bytes: int) -> None:
        """Record plain values that follow a packed message which did not fit. No program can declare them."""
        self.add(message, tier, num_bytes)
        with self._lock:
            self._again[message, tier] += num_bytes

    def again(self) -> dict[tuple[MessageClass, str], int]:
        """The part of the total that no program declares."""
        return dict(self._again)

    def total(self) -> dict[tuple[MessageClass, str], int]:
        return dict(self._sent)


class Meter:
    """Bytes held now and at the peak, per category. Thread-safe: lanes and the executor add from their own threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: dict[str, int] = defaultdict(int)
        self._peak: dict[str, int] = defaultdict(int)

    def add(self, category: str, num_bytes: int) -> None:
        """Record an allocation or, if negative, a release."""
        with self._lock:
            self._now[category] += num_bytes
            # Categories peak at different times, so their peaks do not add up to the peak of all.
            self._peak[category] = max(self._peak[category], self._now[category])

    def now(self) -> dict[str, int]:
        with self._lock:
            return dict(self._now)

    def peak(self) -> dict[str, int]:
        return dict(self._peak)
