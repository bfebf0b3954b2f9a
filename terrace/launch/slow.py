"""Slow ranks: a rank that takes longer for its own work than its peers is named while the run goes on.

A rank's own time in a step is its reading and computing, without its waits for others: a rank that waits for a slow
one is not slow. Each rank publishes figures of its last steps in its heartbeats, and rank 0's watchdog compares
them now and then, so no rank waits and no message is added. A slow link shows in no rank's own time.
"""

import statistics
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from terrace.launch.postmortem import Heartbeat

_LEAST_SHARE = 0.05  # of a step: less is not worth a line


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    rank: int
    factor: float  # own time over the median peer's
    own_s: float
    peers_s: float
    place: str

    def words(self, num_steps: int) -> str:
        return (
            f"rank {self.rank} is slow: {self.own_s:.3g} s of own work a step where its peers take {self.peers_s:.3g} "
            f"s, {self.factor:.1f} times as long, in most of its last {num_steps} steps ({self.place})"
        )


class OwnTimes:
    """Own times of the last steps of this rank."""

    def __init__(self, num_steps: int) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=num_steps)

    def add(self, own_s: float, step_s: float) -> None:
        self._times.append((own_s, step_s))

    def figures(self) -> tuple[float, float, float]:
        """Lower quartile and median of the own time, median of the step; zeros before there are enough steps."""
        if len(self._times) < (self._times.maxlen or 0):
            return 0.0, 0.0, 0.0
        own_s = sorted(own_s for own_s, _ in self._times)
        return own_s[len(own_s) // 4], own_s[len(own_s) // 2], statistics.median(step_s for _, step_s in self._times)


def slow_ranks(
    beats: Sequence[Heartbeat], peers: Sequence[Sequence[int]], factor: float, known: Collection[int] = ()
) -> tuple[SlowRank, ...]:
    """The slow ranks, by `beats` of all ranks; `peers` are the groups of ranks that do the same work.

    A rank is slow if it took `factor` times the median of its peers, even in the quicker steps of its last ones: noise,
    which hits some steps of any rank, names nobody. One that is `known` to be slow stays so until its median falls
    below half of the excess.
    """
    found = []
    for group in peers:
        told = [beats[rank] for rank in group if beats[rank].typical_s]
        for beat in told if len(told) > 1 else ():
            peers_s = statistics.median(other.typical_s for other in told if other is not beat)
            # The lower quartile: three quarters of the steps were at least as slow.
            slow = beat.low_s >= factor * peers_s and beat.low_s - peers_s >= _LEAST_SHARE * beat.step_s
            if slow or (beat.rank in known and beat.typical_s >= (1 + factor) / 2 * peers_s):
                found.append(
                    SlowRank(
                        rank=beat.rank,
                        factor=beat.typical_s / peers_s,
                        own_s=beat.typical_s,
                        peers_s=peers_s,
                        place=beat.place,
                    )
                )
    return tuple(found)
