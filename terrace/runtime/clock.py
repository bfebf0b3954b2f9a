"""Step time by category, from marks on the host or on the device's stream."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict
from itertools import pairwise

import torch

from terrace.accelerator import has_streams

_BETWEEN = "between steps"  # the time up to a start, which no step has taken


def wait_for(device: torch.device) -> None:
    """Synchronize with a device. Does nothing on a CPU."""
    if has_streams(device):
        torch.accelerator.synchronize(device)


def timed_event(device: torch.device) -> torch.Event:
    """An event for timing, recorded now on the current stream of `device`."""
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


class Clock(ABC):
    """Adds the time since the last mark to a category; `doing` is the category of the current computation."""

    doing = "forward"

    @abstractmethod
    def start(self) -> None:
        """Start the times of a step."""

    @abstractmethod
    def mark(self, category: str) -> None:
        """Add the time since the last mark, or since the start, to `category`."""

    @abstractmethod
    def totals(self) -> dict[str, float]:
        """Seconds per category since the start; on a device, of the marks that are over (`StreamClock`)."""


class _NoClock(Clock):
    def start(self) -> None: ...

    def mark(self, category: str) -> None: ...

    def totals(self) -> dict[str, float]:
        return {}


NO_CLOCK: Clock = _NoClock()  # for work on a lane, which is no part of the step's own time


class HostClock(Clock):
    """For a CPU, where calls are synchronous."""

    def __init__(self) -> None:
        self._totals: dict[str, float] = defaultdict(float)
        self._last = 0.0

    def start(self) -> None:
        self._totals.clear()
        self._last = time.perf_counter()

    def mark(self, category: str) -> None:
        now = time.perf_counter()
        self._totals[category] += now - self._last
        self._last = now

    def totals(self) -> dict[str, float]:
        return dict(self._totals)


class StreamClock(Clock):
    """For a device: events on the compute stream.

    The host does not wait for the end of a step: what is not over when the totals are read, the updates after CLIP,
    counts in the next step.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[str, torch.Event]] = []
        self._num_read = 0  # events that the totals have reached; the last of them begins the next interval

    def start(self) -> None:
        self._events = self._events[self._num_read - 1 :] if self._num_read else []
        self._num_read = 0
        self.mark(_BETWEEN)

    def mark(self, category: str) -> None:
        self._events.append((category, timed_event(self._device)))

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        # An event that is over implies all earlier ones on the same stream.
        while self._num_read < len(self._events) and self._events[self._num_read][1].query():
            self._num_read += 1
        over = self._events[: self._num_read]
        for (_, before), (category, after) in pairwise(over):
            if category != _BETWEEN:
                totals[category] += before.elapsed_time(after) / 1e3
        return dict(totals)


def make_clock(device: torch.device) -> Clock:
    return StreamClock(device) if has_streams(device) else HostClock()
