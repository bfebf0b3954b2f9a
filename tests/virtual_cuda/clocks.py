"""Streams, events and the host as vector clocks.

    tick        an operation on stream s: clock_s[s] += 1
    record      event <- clock_s
    wait        clock_s <- max(clock_s, event)
    host waits  host <- max(host, event); every operation begins with clock_s <- max(clock_s, host)

Operation n of stream r comes before whatever stream s does next if and only if clock_s[r] >= n. The host has one clock
for all its threads, so an order that only a lock between threads makes is taken for granted.
"""

from collections.abc import Mapping
from itertools import count

Clock = dict[int, int]  # stream -> its last operation that has been waited for
_PATIENCE = 1000  # answers of False by an event, after which it is over: code that polls until then must end


class Host:
    """What the host has waited for, and which streams there are."""

    def __init__(self, *, early: bool = False) -> None:
        self.early = early  # whether work is over as soon as it is asked for
        self.clock: Clock = {}
        self.version = 0  # of the clock
        self.streams: dict[int, Timeline] = {}
        self._numbers = count()

    def joins(self, clock: Mapping[int, int]) -> None:
        """Wait for all that a clock has seen."""
        merge(self.clock, clock)
        self.version += 1

    def joins_all(self) -> None:
        """Wait for the device."""
        for each in self.streams.values():
            self.joins(each.clock)

    def knows(self, clock: Mapping[int, int]) -> bool:
        """Whether all that a clock has seen is over, as far as the host knows."""
        return all(self.clock.get(stream, 0) >= tick for stream, tick in clock.items())

    def timeline(self, name: str = "") -> "Timeline":
        """A new stream."""
        number = next(self._numbers)
        self.streams[number] = found = Timeline(self, number, name or f"stream {number}")
        return found


class Timeline:
    """The clock of a stream."""

    def __init__(self, host: Host, number: int, name: str) -> None:
        self.host, self.number, self.name = host, number, name
        self.clock: Clock = {number: 0}
        self._seen = 0  # version of the host's clock

    def now(self) -> Clock:
        """The clock with which the next operation begins."""
        if self._seen != self.host.version:
            merge(self.clock, self.host.clock)
            self._seen = self.host.version
        return self.clock

    def tick(self) -> int:
        """Begin an operation. Returns its number."""
        clock = self.now()
        clock[self.number] += 1
        return clock[self.number]

    def waits_for(self, clock: Mapping[int, int]) -> None:
        """Later operations come after all that a clock has seen."""
        merge(self.clock, clock)

    def follows(self, stream: int, tick: int) -> bool:
        """Whether the next operation comes after operation `tick` of a stream."""
        return stream == self.number or self.now().get(stream, 0) >= tick


class Moment:
    """What an event holds: a clock, once it has been recorded."""

    def __init__(self, host: Host) -> None:
        self._host, self._left = host, _PATIENCE
        self.clock: Clock = {}  # of an event that was not recorded: over, as on CUDA

    def record(self, timeline: Timeline) -> None:
        """Stand at this point of a stream."""
        self.clock, self._left = dict(timeline.now()), _PATIENCE

    def is_over(self) -> bool:
        """Answer a query; the host learns from a True."""
        if self._host.knows(self.clock):
            return True
        self._left -= 1
        if not self._host.early and self._left:
            return False
        self._host.joins(self.clock)
        return True


def merge(clock: Clock, other: Mapping[int, int]) -> None:
    """The maximum of two clocks, in place."""
    for stream, tick in other.items():
        if clock.get(stream, 0) < tick:
            clock[stream] = tick
