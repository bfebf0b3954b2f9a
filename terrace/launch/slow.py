"""Names slow ranks, those that take longer for their own work than they should, while the run goes on.

A rank's own time in a step is reading and computing, without waiting for others, so a rank that waits for a slow one
does not count as slow. Each rank publishes statistics of its last steps in its heartbeats, and rank 0's watchdog
compares them periodically, so no rank waits and no message is added. A slow link does not show in any rank's own time.

Ranks of a group do the same work. They are compared with the time reached by the fastest quarter of the group, so three
slow ranks of four are found; and if hardly any rank is fast, with the same statistic of the run's first steps.
"""

import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from terrace.launch.heartbeats import HeartbeatStore
from terrace.launch.postmortem import Heartbeat, in_words
from terrace.launch.silence import Silence

_LEAST_SHARE = 0.05  # of a step: less is not worth a line


@dataclass(frozen=True, kw_only=True)
class SlowRank:
    """A slow rank: its own time, and the reference time, of its fast peers or of the run's first steps."""

    rank: int
    own_s: float
    fast_s: float
    is_history: bool
    place: str

    @property
    def factor(self) -> float:
        return self.own_s / self.fast_s


def in_lines(found: Sequence[SlowRank], num_steps: int) -> list[str]:
    """A line for each group of ranks that are slow by the same comparison, over the last `num_steps` steps."""
    alike: dict[tuple[float, bool], list[SlowRank]] = {}
    for each in found:
        alike.setdefault((each.fast_s, each.is_history), []).append(each)
    lines = []
    for (fast_s, is_history), slow in alike.items():
        worst = max(slow, key=lambda each: each.own_s)
        peers = f"in the run's first steps it took {fast_s:.3g} s" if is_history else f"fast peers take {fast_s:.3g} s"
        ranks = in_words(each.rank for each in slow)
        if len(slow) == 1:
            who, times = f"{ranks} is slow", f"{worst.factor:.1f} times as long"
        else:
            who, times = f"{ranks} are slow", f"up to {worst.factor:.1f} times as long (rank {worst.rank})"
        lines.append(
            f"{who}: {worst.own_s:.3g} s of own work a step where {peers}, {times}, in most of the last {num_steps} "
            f"steps ({worst.place})"
        )
    return lines


def slowest_of(beats: Sequence[Heartbeat]) -> tuple[int, float] | None:
    """The rank with the most own work, and its median own seconds per step; None until all ranks have statistics."""
    if not all(beat.typical_s for beat in beats):
        return None
    slowest = max(beats, key=lambda beat: beat.typical_s)
    return slowest.rank, slowest.typical_s


class OwnTimes:
    """Own times of this rank's last `num_steps` steps; 0 keeps none."""

    def __init__(self, num_steps: int) -> None:
        self._times: deque[tuple[float, float]] = deque(maxlen=num_steps)

    def add(self, own_s: float, step_s: float) -> None:
        self._times.append((own_s, step_s))

    def figures(self) -> tuple[float, float, float]:
        """Lower quartile and median of the own time, median of the step; zeros until `num_steps` steps are recorded."""
        if not self._times or len(self._times) < (self._times.maxlen or 0):
            return 0.0, 0.0, 0.0
        own_s = sorted(own_s for own_s, _ in self._times)
        return own_s[len(own_s) // 4], own_s[len(own_s) // 2], statistics.median(step_s for _, step_s in self._times)


class Comparison:
    """Finds slow ranks from the heartbeats of all ranks; `peers` are the groups of ranks that do the same work.

    A rank is slow if the lower quartile of its recent own times is `factor` times the fastest quarter of its group, now
    or in the run's first steps. Using the lower quartile ignores noise that hits only some steps. A slow rank stays
    slow until its median falls below half of the excess.
    """

    def __init__(self, peers: Sequence[Sequence[int]], factor: float) -> None:
        self._peers, self._factor = tuple(tuple(group) for group in peers), factor
        self._first_s: dict[tuple[int, ...], float] = {}
        self._known: frozenset[int] = frozenset()

    def look(self, beats: Sequence[Heartbeat]) -> tuple[SlowRank, ...]:
        """The ranks that are slow now."""
        found = [each for group in self._peers for each in self._slow_in(group, beats)]
        self._known = frozenset(each.rank for each in found)
        return tuple(found)

    def _slow_in(self, group: tuple[int, ...], beats: Sequence[Heartbeat]) -> list[SlowRank]:
        newest = [beats[rank] for rank in group]
        if not all(beat.typical_s for beat in newest):
            return []
        now_s = sorted(beat.typical_s for beat in newest)[(len(newest) - 1) // 4]
        first_s = self._first_s.setdefault(group, now_s)
        # Half of the excess, as for a slow rank: what is slow by history stays so until then.
        is_history = now_s >= (1 + self._factor) / 2 * first_s
        fast_s = first_s if is_history else now_s
        found = []
        for beat in newest:
            # The lower quartile: three quarters of the steps were at least as slow.
            slow = beat.low_s >= self._factor * fast_s and beat.low_s - fast_s >= _LEAST_SHARE * beat.step_s
            if slow or (beat.rank in self._known and beat.typical_s >= (1 + self._factor) / 2 * fast_s):
                found.append(
                    SlowRank(
                        rank=beat.rank, own_s=beat.typical_s, fast_s=fast_s, is_history=is_history, place=beat.place
                    )
                )
        return found


_LOOK_S = 2.0  # between two looks, in a small world


class Lookout:
    """Periodic look at all heartbeats, for slow and silent ranks. Only rank 0 and the last rank look: two, in case one
    of them is silent.

    `least_s` is the minimum time between two looks. Only the watchdog's thread sets the attributes.
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
        """From now on, compares ranks with their `peers` (terrace.launch.slow)."""
        self._comparison = Comparison(peers, factor)

    def look(self, heartbeats: HeartbeatStore) -> None:
        """Looks if it is time to. Raises `RuntimeError` if the store does not answer."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._wait_s:
            return
        self._looked_s = now_s
        beats = heartbeats.read_all()
        self.is_silent = self._silence.look(beats, now_s)
        if self._is_first:
            self.slow, self.slowest = self._comparison.look(beats), slowest_of(beats)
