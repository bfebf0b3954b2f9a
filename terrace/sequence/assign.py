"""Assigns documents to ring ranks for `balance = "cost"`. Pure, deterministic, equal on every rank.

Documents are assigned longest first, under a time limit per ring rank (Zeppelin, 2509.21841, section 4, has two levels
of buckets; here every tier that joins ring ranks is a level). A document goes to

    one ring rank   the least full one that stays below the limit, else the one with the least time
    a ring          of as few ring ranks of one unit as stay below the limit, least full ones of the least full unit
    whole units     as few as stay below the limit, least full ones of the innermost tier with such units

If nothing stays below the limit, it goes to the group that finishes first, whose time becomes the new limit. The
fullness of a rank is its time over the limit or its tokens over an even share, whichever is larger, and the limit
reserves room for the shortest documents. So long documents balance time, while short ones, which take almost none, fill
ranks with few tokens, and fewer tokens move for the linear layers. The first limit is slightly above a perfect split;
others are tried while the result is not good enough.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from terrace.base.errors import PlanError
from terrace.sequence.candidate_rings import CandidateRings
from terrace.sequence.cost import WorkCost, ring_tokens
from terrace.sequence.segments import Segment


class _Try(NamedTuple):
    # One attempt: a limit, and the work that it initially reserves room for.
    slack: float  # the limit over the time of a perfect split
    reserved: float  # share of the work, in the shortest documents; a larger share makes the other rings wider
    longest: float  # longest of these documents, as a share of the limit


_TRIES = (
    _Try(1.004, 0.03, 0.1),
    _Try(1.015, 0.03, 1.0),
    _Try(1.004, 0.0, 0.0),
    *(
        _Try(slack, reserved, 1.0)
        for slack in (1.004, 1.015, 1.03, 1.0, 1.022, 1.045, 1.06, 1.08, 1.11, 1.15)
        for reserved in (0.03, 0.0, 0.1, 0.2, 0.4)
    ),
)
_ENOUGH = 1.02  # times the perfect split: good enough to stop trying
_EFFORT, _LEAST_TRIES = 6000, 3  # budget of all tries; one costs documents + ring ranks
_GROWTH, _HALVINGS = 1.2, 5  # the perfect split is found to 1.2 / 2^5, half a percent
_NEIGHBOURS = 3  # number of least full units per tier that are tried for a ring


@dataclass(frozen=True)
class Assignment:
    """Segments in the order of the lengths; token indices run through the concatenated documents."""

    segments: tuple[Segment, ...]
    seconds: tuple[float, ...]  # attention of each ring rank, one layer, forward and backward
    tokens: tuple[int, ...]  # upper bound of the tokens that each ring rank attends to

    @property
    def makespan_s(self) -> float:
        """Seconds until the last ring rank finishes."""
        return max(self.seconds)


def assign(lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int) -> Assignment:
    """Assign documents to ring ranks that each attend to at most `capacity` tokens.

    `ring_degrees` is the number of ring ranks that each tier joins, innermost first. Raises `PlanError` if the tokens
    do not fit; with `sure_capacity` they always do.
    """
    assert all(length > 0 for length in lengths)
    rings = CandidateRings(tuple(ring_degrees), cost, capacity)
    _check_room(lengths, rings)
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    whole_s = [cost.whole_s(length) for length in lengths]
    perfect = _perfect_s(lengths, whole_s, order, rings)
    best = _round_robin(lengths, whole_s, rings)
    for attempt in _TRIES[: max(_LEAST_TRIES, _EFFORT // (len(lengths) + rings.num_ring_ranks))]:
        found = _Filling(rings, sum(lengths), perfect * attempt.slack).fill(lengths, whole_s, order, attempt)
        if found and (best is None or max(found.seconds) < max(best.seconds)):
            best = found
        if best and max(best.seconds) <= perfect * _ENOUGH:
            break
    best = best or _spread_out(lengths, whole_s, order, rings)
    if best is None:
        raise PlanError(
            f"{len(lengths)} documents of up to {max(lengths)} tokens do not fit on {rings.num_ring_ranks} ring ranks "
            f"of {capacity} tokens: lower the tokens of a micro-batch or give a ring rank more"
        )
    starts = accumulate(lengths, initial=0)
    segments = tuple(
        Segment(start, start + length, ring_ranks, ring)
        for start, length, (ring_ranks, ring) in zip(starts, lengths, best.rings, strict=False)
    )
    return Assignment(segments, tuple(best.seconds), tuple(best.tokens))


def _check_room(lengths: Sequence[int], rings: CandidateRings) -> None:
    longest = max(lengths, default=0)
    needed = min(ring_tokens(longest, shape.num_ring_ranks) for shape in rings.shapes)
    if needed > rings.capacity or sum(lengths) > rings.capacity * rings.num_ring_ranks:
        raise PlanError(
            f"{sum(lengths)} tokens, the longest document {longest}, do not fit on {rings.num_ring_ranks} ring ranks "
            f"of {rings.capacity} tokens: shorten documents, add context ranks or give a ring rank more tokens"
        )


def _perfect_s(lengths: Sequence[int], whole_s: Sequence[float], order: Sequence[int], rings: CandidateRings) -> float:
    # About the least makespan that the total work allows: documents longer than an even share run on the narrowest
    # rings that meet the limit; the rest is divisible.
    total = sum(whole_s)
    low = total / rings.num_ring_ranks
    alone = [
        (lengths[index], whole_s[index]) for index in order if whole_s[index] > low or lengths[index] > rings.capacity
    ]
    rest = total - sum(seconds for _, seconds in alone)

    def is_possible(limit: float) -> bool:
        wanted = rest
        for length, seconds in alone:
            index = _narrowest(length, seconds, rings, limit)
            if index < 0:
                return False
            wanted += rings.seconds(length, index) * rings.shapes[index].num_ring_ranks
        return wanted <= limit * rings.num_ring_ranks

    high = low
    while not is_possible(high):
        low, high = high, high * _GROWTH
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return high


def _narrowest(length: int, alone_s: float, rings: CandidateRings, limit: float) -> int:
    # The first ring, from the narrowest, that finishes within the limit; the tolerance keeps rounding from skipping it.
    for _, indices in rings.wide(max(alone_s / limit * (1 - 1e-9), length / rings.capacity)):
        for index in indices:
            if rings.fits(length, index) and rings.seconds(length, index) <= limit:
                return index
    return -1


def _last(whole_s: Sequence[float], order: Sequence[int], part: float, short_s: float) -> tuple[int, float]:
    # The longest tail of short documents that is at most `part` of the work: where it begins in `order`, and its
    # seconds.
    at, most, seconds = len(order), part * sum(whole_s), 0.0
    while at and whole_s[order[at - 1]] <= min(short_s, most - seconds):
        at -= 1
        seconds += whole_s[order[at]]
    return at, seconds


_Group = tuple[tuple[int, ...], tuple[int, ...]]  # ring ranks, and the degrees of their ring


class _Dealt(NamedTuple):
    # The ring of every document; seconds and tokens of every ring rank.
    rings: list[_Group]
    seconds: list[float]
    tokens: list[int]


def _round_robin(lengths: Sequence[int], whole_s: Sequence[float], rings: CandidateRings) -> _Dealt | None:
    seconds, tokens = [0.0] * rings.num_ring_ranks, [0] * rings.num_ring_ranks
    for index, length in enumerate(lengths):
        ring_rank = index % rings.num_ring_ranks
        seconds[ring_rank] += whole_s[index]
        tokens[ring_rank] += length
    chosen: list[_Group] = [((index % rings.num_ring_ranks,), (1,)) for index in range(len(lengths))]
    return _Dealt(chosen, seconds, tokens) if max(tokens) <= rings.capacity else None


def _spread_out(
    lengths: Sequence[int], whole_s: Sequence[float], order: Sequence[int], rings: CandidateRings
) -> _Dealt | None:
    # The assignment that `sure_capacity` proves to fit; None where that does not fit either.
    num_ring_ranks, widest = rings.num_ring_ranks, len(rings.shapes) - 1
    share = -(-sum(lengths) // num_ring_ranks)
    chosen: list[_Group] = [((), ())] * len(lengths)
    seconds, tokens = [0.0] * num_ring_ranks, [0] * num_ring_ranks
    for index in order:
        if lengths[index] > share:
            ring_ranks, part = tuple(range(num_ring_ranks)), ring_tokens(lengths[index], num_ring_ranks)
            part_s = rings.seconds(lengths[index], widest)
        else:
            ring_ranks, part, part_s = (tokens.index(min(tokens)),), lengths[index], whole_s[index]
        for ring_rank in ring_ranks:
            tokens[ring_rank] += part
            seconds[ring_rank] += part_s
        chosen[index] = ring_ranks, rings.shapes[widest if len(ring_ranks) > 1 else 0].ring
    return _Dealt(chosen, seconds, tokens) if max(tokens) <= rings.capacity else None


@dataclass
class _Units:
    """Load of each unit of a tier: the sum of its ring ranks' fullness, and the maximum of their seconds and tokens."""

    size: int
    full: list[float]
    seconds: list[float]
    tokens: list[int]

    @staticmethod
    def empty(size: int, num_ring_ranks: int) -> "_Units":
        number = num_ring_ranks // size
        return _Units(size, [0.0] * number, [0.0] * number, [0] * number)


class _Filling:
    def __init__(self, rings: CandidateRings, num_tokens: int, limit: float) -> None:
        # State of the ring ranks while they fill up under one limit.
        self.rings, self.limit, self.capacity = rings, limit, rings.capacity
        num_ring_ranks = rings.num_ring_ranks
        self.units = [_Units.empty(size, num_ring_ranks) for size in (1, *rings.sizes)]  # children of tier i: units[i]
        ring_ranks = self.units[0]
        self.seconds, self.tokens, self.full = ring_ranks.seconds, ring_ranks.tokens, ring_ranks.full
        self.per_second = 1 / limit if limit else 0.0
        self.per_token = num_ring_ranks / num_tokens if num_tokens else 0.0
        self.by_full = [
            (0.0, ring_rank) for ring_rank in range(num_ring_ranks)
        ]  # heaps that may contain outdated entries
        self.by_seconds = list(self.by_full)

    def fill(
        self, lengths: Sequence[int], whole_s: Sequence[float], order: Sequence[int], attempt: _Try
    ) -> _Dealt | None:
        chosen: list[_Group] = [((), ())] * len(lengths)
        last, reserved_s = _last(whole_s, order, attempt.reserved, self.limit * attempt.longest)
        reserved_s /= self.rings.num_ring_ranks
        self.limit -= reserved_s
        for at, index in enumerate(order):
            self.limit += reserved_s if at == last else 0.0
            length, alone_s = lengths[index], whole_s[index]
            ring_rank = self._one_place(length, alone_s)
            if ring_rank >= 0:
                self._add(ring_rank, length, alone_s)
                chosen[index] = (ring_rank,), (1,)
                continue
            found = self._several(length, alone_s)
            if found is None:
                return None
            number, ring_ranks = found
            shape = self.rings.shapes[number]
            seconds, part = self.rings.seconds(length, number), ring_tokens(length, shape.num_ring_ranks)
            for ring_rank in ring_ranks:
                self._add(ring_rank, part, seconds)
            chosen[index] = ring_ranks, shape.ring
        return _Dealt(chosen, self.seconds, self.tokens)

    def _one_place(self, length: int, alone_s: float) -> int:
        room_s, room = self.limit - alone_s, self.capacity - length
        if room_s < 0 or room < 0:
            return -1
        for heap, values in ((self.by_full, self.full), (self.by_seconds, self.seconds)):
            while heap[0][0] != values[heap[0][1]]:
                heapq.heappop(heap)
            ring_rank = heap[0][1]
            if self.seconds[ring_rank] <= room_s and self.tokens[ring_rank] <= room:
                return ring_rank
        return -1

    def _add(self, ring_rank: int, num_tokens: int, seconds: float) -> None:
        self.seconds[ring_rank] = seconds = self.seconds[ring_rank] + seconds
        self.tokens[ring_rank] = num_tokens = self.tokens[ring_rank] + num_tokens
        full = max(seconds * self.per_second, num_tokens * self.per_token)
        more = full - self.full[ring_rank]
        self.full[ring_rank] = full
        for units in self.units[1:]:
            unit = ring_rank // units.size
            units.full[unit] += more
            if seconds > units.seconds[unit]:
                units.seconds[unit] = seconds
            if num_tokens > units.tokens[unit]:
                units.tokens[unit] = num_tokens
        heapq.heappush(self.by_full, (full, ring_rank))
        heapq.heappush(self.by_seconds, (seconds, ring_rank))

    def _several(self, length: int, alone_s: float) -> tuple[int, tuple[int, ...]] | None:
        # The first ring that stays below the limit, else the one that finishes first.
        least = max(alone_s / self.limit if self.limit else 1.0, length / self.capacity)
        best: _Found | None = None
        for tier, indices in self.rings.wide(least):
            full = self.units[tier + 1].full
            for unit in heapq.nsmallest(_NEIGHBOURS, range(len(full)), key=full.__getitem__):
                found = self._in_unit(length, indices, tier, unit)
                if found and (best is None or found[0] < best[0]):
                    best = found
                if best and best[0] <= self.limit:
                    return best[1:]
        if best is None:
            return None
        self.limit = best[0]  # the makespan is at least this now
        return best[1:]

    def _in_unit(self, length: int, indices: Sequence[int], tier: int, unit: int) -> "_Found | None":
        children, number = self.units[tier], self.rings.ring_degrees[tier]
        order = sorted(range(unit * number, (unit + 1) * number), key=children.seconds.__getitem__)
        most = max(children.tokens[unit * number : (unit + 1) * number])
        best: tuple[float, int, list[int]] | None = None
        for index in indices:
            shape = self.rings.shapes[index]
            room = self.capacity - ring_tokens(length, shape.num_ring_ranks)
            open_ = order if most <= room else [child for child in order if children.tokens[child] <= room]
            if len(open_) < shape.num_children:
                continue
            ends = children.seconds[open_[shape.num_children - 1]] + self.rings.seconds(length, index)
            if best is None or ends < best[0]:
                best = ends, index, open_[: shape.num_children]
            if ends <= self.limit:
                break
        if best is None:
            return None
        ring_ranks = (range(child * children.size, (child + 1) * children.size) for child in sorted(best[2]))
        return best[0], best[1], tuple(ring_rank for run in ring_ranks for ring_rank in run)


_Found = tuple[float, int, tuple[int, ...]]  # end of the document, index of its shape, its ring ranks
