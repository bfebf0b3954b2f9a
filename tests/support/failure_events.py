"""Failures, restarts, saves and repairs played one by one, as a reference for the closed forms of goodput.

It is written from what happens to a job (docs/failures.md) and shares no formula with `terrace.planner.goodput`: parts
have lifetimes of their own, a restart may be struck, and a save that was begun before a failure counts only if it was
written by then.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Synchronous:
    """A job that any failure stops. `parts` are (number, mean seconds between failures of one) of each kind."""

    parts: Sequence[tuple[int, float]]
    restart_s: float
    work_s: float
    stall_s: float
    write_s: float = 0.0
    spares: int = 10**9
    repair_s: float = 1.0
    repairs: str = "random"  # or "fixed": all take as long

    def play(self, num_failures: int, seed: int) -> float:
        """Progress over wall time of a run with so many failures."""
        draw = random.Random(seed)
        strikes = _strikes(self.parts, draw)
        in_repair: list[float] = []  # wall time at which each machine is back
        wall_s, done_s, is_up = 0.0, 0.0, True
        for _ in range(num_failures):
            uptime_s = next(strikes)
            done_s += self._saved_s(uptime_s, is_up)
            wall_s, is_up = wall_s + uptime_s, False
            while in_repair and in_repair[0] <= wall_s:
                heapq.heappop(in_repair)
            took_s = self.repair_s if self.repairs == "fixed" else draw.expovariate(1 / self.repair_s)
            heapq.heappush(in_repair, wall_s + took_s)
            if len(in_repair) > self.spares:  # nothing runs, so nothing fails
                wall_s = heapq.heappop(in_repair)
        return done_s / wall_s

    def _saved_s(self, uptime_s: float, is_up: bool) -> float:
        """Seconds of work whose save counts before the next failure comes after `uptime_s`."""
        now_s, kept_s, made_s = 0.0 if is_up else self.restart_s, 0.0, 0.0
        being_written: list[tuple[float, float]] = []  # (when it counts, work until then)
        while True:
            now_s += self.work_s
            made_s += self.work_s
            now_s += self.stall_s
            being_written.append((now_s + self.write_s, made_s))
            while being_written and being_written[0][0] <= min(now_s, uptime_s):
                kept_s = being_written.pop(0)[1]
            if now_s > uptime_s:
                break
        for counts_s, made_until_s in being_written:
            if counts_s <= uptime_s:
                kept_s = made_until_s
        return kept_s


def _strikes(parts: Sequence[tuple[int, float]], draw: random.Random) -> "_Strikes":
    return _Strikes(parts, draw)


class _Strikes:
    """Iterates over the seconds from each failure of any part to the next; a part that failed is replaced."""

    def __init__(self, parts: Sequence[tuple[int, float]], draw: random.Random) -> None:
        self._draw, self._now_s = draw, 0.0
        self._ends = [(draw.expovariate(1 / mean_s), mean_s) for number, mean_s in parts for _ in range(number)]
        heapq.heapify(self._ends)

    def __next__(self) -> float:
        at_s, mean_s = self._ends[0]
        heapq.heapreplace(self._ends, (at_s + self._draw.expovariate(1 / mean_s), mean_s))
        passed_s, self._now_s = at_s - self._now_s, at_s
        return passed_s


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """Members that fail and come back one by one, while the others go on and exchange every `exchange_s`."""

    num_members: int
    member_s: float  # mean time between failures of one
    absent_s: float  # from a failure until it is back, on a machine that stands by
    dead_s: float  # for which all that are there stand still at each leave and return
    exchange_s: float = 0.0  # work since the last exchange dies with its member; 0: nothing does
    spares: int = 10**9
    repair_s: float = 1.0

    def play(self, num_failures: int, seed: int) -> float:
        """Progress over the wall time of all members."""
        draw, free, waiting = random.Random(seed), self.spares, 0
        present = self.num_members
        last_s = stalled_until_s = work_s = 0.0
        queue: list[tuple[float, int, Callable[[], None]]] = []
        number = failed = 0

        def at(when_s: float, what: Callable[[], None]) -> None:
            nonlocal number
            number += 1
            heapq.heappush(queue, (when_s, number, what))

        def leave() -> None:
            nonlocal present, failed, free, waiting, stalled_until_s, work_s
            present, failed = present - 1, failed + 1
            stalled_until_s = max(stalled_until_s, last_s + self.dead_s)
            work_s -= last_s % self.exchange_s if self.exchange_s else 0.0
            at(last_s + draw.expovariate(1 / self.repair_s), repaired)
            if free:
                free -= 1
                at(last_s + self.absent_s, come)
            else:
                waiting += 1

        def repaired() -> None:
            nonlocal free, waiting
            if waiting:
                waiting -= 1
                at(last_s + self.absent_s, come)
            else:
                free += 1

        def come() -> None:
            nonlocal present, stalled_until_s
            present += 1
            stalled_until_s = max(stalled_until_s, last_s + self.dead_s)
            at(last_s + draw.expovariate(1 / self.member_s), leave)

        for _ in range(self.num_members):
            at(draw.expovariate(1 / self.member_s), leave)
        while failed < num_failures:
            now_s, _, what = heapq.heappop(queue)
            work_s += present * max(0.0, now_s - max(last_s, min(stalled_until_s, now_s)))
            last_s = now_s
            what()
        return work_s / (self.num_members * last_s)
