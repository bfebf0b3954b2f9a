"""Step time by category, from marks on the host or on the CUDA stream."""

import time
from abc import ABC, abstractmethod
from collections import defaultdict

import torch


def wait_for(device: torch.device) -> None:
    """Synchronize with a device. Does nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        """Seconds per category since the start. Synchronizes on CUDA."""


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


class CudaClock(Clock):
    """For CUDA: events on the compute stream, read at the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._events: list[tuple[str, torch.cuda.Event]] = []

    def start(self) -> None:
        self._events = []
        self.mark("start")

    def mark(self, category: str) -> None:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._events.append((category, event))

    def totals(self) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        # The last event implies all earlier ones on the same stream.
        self._events[-1][1].synchronize()
        for (_, before), (category, after) in zip(self._events, self._events[1:], strict=False):
            totals[category] += before.elapsed_time(after) / 1e3
        return dict(totals)


def make_clock(device: torch.device) -> Clock:
    return CudaClock(device) if device.type == "cuda" else HostClock()
