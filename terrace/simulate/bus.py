"""A bus shared by the messages of several tiers (`Tier.bus`), as the clock of a rank sees it.

While messages on tiers i and j overlap, each takes 1 + share(i, j) times as long: with a share of 1, both together take
as long as in sequence. A rank's clock (`Rank.now_s`, arrivals, lanes) counts the seconds that a message would take
alone, so a known arrival never moves; where the bus is contended, wall time runs ahead of the clock. The bus does not
slow compute: compute advances the clock by less than its own seconds.

With three tiers on one bus, the slow-down of the most slowed tier applies to all messages in flight, including those on
other tiers.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

Piece = tuple[float, float, float]  # from, to, and by how much the wall runs ahead of the clock in between


class Stretch(NamedTuple):
    """An interval in which a lane is busy without a pause."""

    lane: int
    begin_s: float
    end_s: float


class Bus:
    """Busy intervals of the lanes that share a bus, in the rank's clock."""

    __slots__ = ("_ahead_of", "_busy", "_shares")

    def __init__(self, shares: Sequence[tuple[int, int, float]]) -> None:
        self._shares: dict[tuple[int, int], float] = {}
        for one, other, share in shares:
            self._shares[one, other] = self._shares[other, one] = share
        self._ahead_of: dict[tuple[int, ...], float] = {}  # by how much the wall runs ahead, by the lanes that run
        self._busy: dict[int, deque[tuple[float, float]]] = {lane: deque() for lane, _ in self._shares}

    def add(self, lane: int, begin_s: float, end_s: float) -> None:
        """Append a message to a lane, after those already added."""
        stretches = self._busy.get(lane)
        if stretches is None:
            return
        if stretches and stretches[-1][1] == begin_s:
            begin_s, _ = stretches.pop()
        stretches.append((begin_s, end_s))

    def go_on(self, lane: int, seconds: float) -> None:
        """Shift a lane's messages `seconds` earlier: they progressed while the rank's clock stood still."""
        stretches = self._busy.get(lane)
        if stretches:
            self._busy[lane] = deque((begin_s - seconds, end_s - seconds) for begin_s, end_s in stretches)

    def left(self, now_s: float) -> tuple[Stretch, ...]:
        """Stretches that end after `now_s`, relative to it."""
        return tuple(
            Stretch(lane, max(0.0, begin_s - now_s), end_s - now_s)
            for lane, stretches in self._busy.items()
            for begin_s, end_s in stretches
            if end_s > now_s
        )

    def enter(self, stretches: Iterable[Stretch]) -> None:
        """Reset to these stretches, in order, with the clock at 0."""
        for known in self._busy.values():
            known.clear()
        for lane, begin_s, end_s in stretches:
            self._busy[lane].append((begin_s, end_s))

    def longer_s(self, now_s: float, clock_s: float) -> float:
        """Extra wall seconds during the next `clock_s` seconds of the clock."""
        end_s, found_s = now_s + clock_s, 0.0
        for from_s, to_s, ahead in self._pieces(now_s):
            if from_s >= end_s:
                break
            found_s += ahead * (min(to_s, end_s) - from_s)
        return found_s

    def clock_s(self, now_s: float, wall_s: float) -> float:
        """Clock seconds that pass during the next `wall_s` wall seconds."""
        at_s, left_s = now_s, wall_s
        for from_s, to_s, ahead in self._pieces(now_s):
            if left_s <= from_s - at_s:
                break
            left_s -= from_s - at_s
            taken_s = (to_s - from_s) * (1.0 + ahead)
            if left_s <= taken_s:
                return from_s + left_s / (1.0 + ahead) - now_s
            at_s, left_s = to_s, left_s - taken_s
        return at_s + left_s - now_s

    def _pieces(self, now_s: float) -> Iterator[Piece]:
        """Intervals from `now_s` on in which several lanes are busy, in order, with their slow-down."""
        for stretches in self._busy.values():
            while stretches and stretches[0][1] <= now_s:
                stretches.popleft()
        places = {lane: 0 for lane, stretches in self._busy.items() if stretches}
        if len(places) < 2:  # a lane alone shares nothing
            return
        at_s, ahead_of = now_s, self._ahead_of
        while len(places) > 1:
            running, edge_s = list[int](), math.inf
            for lane, place in places.items():
                begin_s, end_s = self._busy[lane][place]
                if begin_s <= at_s:
                    running.append(lane)
                    begin_s = end_s
                if begin_s < edge_s:
                    edge_s = begin_s
            if len(running) > 1:
                among = tuple(running)
                ahead = ahead_of.get(among)
                if ahead is None:
                    ahead = ahead_of[among] = self._ahead(among)
                if ahead > 0.0:
                    yield at_s, edge_s, ahead
            at_s = edge_s
            for lane in running:
                stretches = self._busy[lane]
                if stretches[places[lane]][1] <= at_s:
                    places[lane] += 1
                    if places[lane] == len(stretches):
                        del places[lane]

    def _ahead(self, running: Sequence[int]) -> float:
        return max(sum(self._shares.get((lane, other), 0.0) for other in running) for lane in running)


def progress_s(penalty: float, longer_s: float, left_s: float) -> float:
    """Seconds by which a message with `left_s` left progresses while the clock stands still.

    The clock stands still for `longer_s` plus the message's own core time; the message progresses during the share of
    this time in which it needs no cores.
    """
    return min(left_s, (1.0 - penalty) * longer_s / (1.0 - penalty * (1.0 - penalty)))
