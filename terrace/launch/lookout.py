"""Looks at the heartbeats of all ranks now and then: whether one is silent, and which are slow."""

import math
import time
from collections.abc import Sequence

from terrace.launch.heartbeats import HeartbeatStore
from terrace.launch.silence import Silence
from terrace.launch.slow import Comparison, SlowRank, slowest_of

_LOOK_S = 2.0  # between two looks, in a small world


class Lookout:
    """The look of one rank; only rank 0 and the last rank look: two, since one of them may be silent.

    `least_s` is the least time between two looks. The watchdog's thread alone sets the attributes.
    """

    def __init__(self, rank: int, world_size: int, *, limit_s: float, least_s: float) -> None:
        self.is_silent = False
        self.slow: tuple[SlowRank, ...] = ()  # by the last look, as `slowest`; on rank 0 alone
        self.slowest: tuple[int, float] | None = None
        self._silence, self._comparison = Silence(limit_s), Comparison((), 1.0)
        self._is_first = rank == 0
        self._wait_s = max(_LOOK_S, least_s) if rank in (0, world_size - 1) else math.inf
        self._looked_s = time.monotonic()

    def compare(self, peers: Sequence[Sequence[int]], factor: float) -> None:
        """From now on, ranks are compared with their `peers` (terrace.launch.slow)."""
        self._comparison = Comparison(peers, factor)

    def look(self, heartbeats: HeartbeatStore) -> None:
        """Looks where it is time to. Raises `RuntimeError` without an answer of the store."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._wait_s:
            return
        self._looked_s = now_s
        beats = heartbeats.read_all()
        self.is_silent = self._silence.look(beats, now_s)
        if self._is_first:
            self.slow, self.slowest = self._comparison.look(beats), slowest_of(beats)
