"""Attention over rows of several documents, relative to whole rows; means over drawn micro-batches.

A row of documents (terrace.sequence.lengths) has fewer pairs of a query and a key than one document of its length, and
they are spread unevenly over ranks. Kernels that skip what documents do not attend to take

    seconds = seconds of a whole row * (pairs + h/2 queries) / (the same of a whole row)

where h is the number of keys with which a kernel reaches half its rate (`Kernels.attention_half_keys`), and `queries`
counts a query once for its own keys and once for every other rank's chunk of keys that it sees. The slowest rank
counts:

    balance = "tokens"   the ring ranks of a row meet in every layer, so the busiest counts; data ranks meet where
                         parameters are gathered, in every micro-batch, else once a step
    balance = "cost"     the ring rank that finishes last under the assignment that runs (terrace.sequence.dealt), with
                         the messages that nothing hides
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from terrace.plan.context import CHUNKS_PER_RING_RANK, chunk_tokens
from terrace.sequence.balanced import micro_steps
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.cost import WorkCost
from terrace.sequence.dealt import deal
from terrace.sequence.lengths import Lengths, MeanDealt, Ragged, Row, drawn_micros, drawn_rows

_Value = TypeVar("_Value")

_MOST_DRAWN = 16  # micro-steps of a mean
_FEWEST_ROWS = 512  # of a mean, as few rows miss rare long documents
_DEALT_TOGETHER = 4  # micro-batches of a step that are dealt by cost
# Micro-batches between two meetings of the data ranks, and their rows, that are drawn at most. The busiest data rank of
# more micro-batches is nearer to the mean.
_TOGETHER, _ROWS_TOGETHER = (8, 64), 8192


def drawn_together(num_micros: int, num_rows: int) -> int:
    """Micro-batches of `num_rows` rows, over all data ranks, that are drawn for a step of `num_micros`."""
    fewest, most = _TOGETHER
    return min(num_micros, max(fewest, min(most, _ROWS_TOGETHER // num_rows)))


class Loads(NamedTuple):
    """Pairs, and queries as often as they are multiplied, of a ring rank's own keys and of other ring ranks' keys."""

    own_pairs: float
    own_queries: float
    later_pairs: float
    later_queries: float

    def total(self, half_keys: float) -> float:
        return self.own_pairs + self.later_pairs + half_keys / 2 * (self.own_queries + self.later_queries)


class Shares(NamedTuple):
    """Attention over that of whole rows; (forward, backward) of the slowest rank's own and other keys."""

    own: tuple[float, float] = (1.0, 1.0)
    later: tuple[float, float] = (1.0, 1.0)
    slowest: float = 1.0
    mean: float = 1.0  # over all ranks
    spread: float = 0.0  # standard deviation of the slowest rank's work over its mean


def row_loads(row: Row, sequence: int, ring: int, window: int = 0) -> tuple[Loads, ...]:
    """Loads of the ring ranks that share a row of documents in zig-zag chunks (terrace.plan.context).

    Under a window all pairs count as those of own keys, as they nearly all are.
    """
    counts = WorkCost(links=(), pair_s=1.0, key_bytes=0.0, query_bytes=0.0, window=window)
    chunk, last = chunk_tokens(sequence, ring), CHUNKS_PER_RING_RANK * ring - 1
    found = [[0.0, 0.0, 0.0, 0.0] for _ in range(ring)]
    start = 0
    for length in row:
        stop, first = start + length, start // chunk
        for at in range(first, (stop - 1) // chunk + 1):
            begin, end = max(start, at * chunk), min(stop, (at + 1) * chunk)
            ring_rank = min(at, last - at)
            load, pairs = found[ring_rank], counts.pairs(end - start) - counts.pairs(begin - start)
            load[1] += end - begin
            if ring == 1 or 0 < window < sequence:
                load[0] += pairs
                continue
            # A late chunk also sees what the document has of the rank's early chunk, in the first round.
            early = at > ring_rank and first <= ring_rank
            seen = (ring_rank + 1) * chunk - max(start, ring_rank * chunk) if early else 0
            own = counts.pairs(end - begin) + (end - begin) * seen
            load[0] += own
            load[2] += pairs - own
            load[3] += (end - begin) * (at - first - early)
        start = stop
    return tuple(Loads(*each) for each in found)


@lru_cache(maxsize=256)
def _loads(lengths: Lengths, sequence: int, ring: int, window: int) -> dict[Row, tuple[Loads, ...]]:
    return {row: row_loads(row, sequence, ring, window) for row in set(drawn_rows(lengths, sequence))}


@lru_cache(maxsize=4096)
def drawn_shares(
    ragged: Ragged, sequence: int, micro_batch: int, ring: int, data: int, window: int, halves: tuple[float, float]
) -> Shares:
    loads = _loads(ragged.lengths, sequence, ring, window)
    whole = max(row_loads((sequence,), sequence, ring, window), key=lambda each: each.total(halves[0]))
    slowest, means = list[Loads](), list[float]()
    num_rows = micro_batch * data * ragged.together
    for rows in drawn_micros(ragged.lengths, sequence, num_rows, max(_MOST_DRAWN, _FEWEST_ROWS // num_rows)):
        # The busiest ring rank of each micro-batch, then the data rank with the most work of those between meetings.
        micros = [_busiest([loads[row] for row in micro], halves[0]) for micro in _batched(rows, micro_batch)]
        ranks = [_sum(each) for each in _batched(micros, ragged.together)]
        slowest.append(max(ranks, key=lambda each: each.total(halves[0])))
        means.append(sum(load.total(halves[0]) for row in rows for load in loads[row]) / (ring * data))
    per = 1 / (len(slowest) * micro_batch * ragged.together)

    def share(at: int, half: float) -> float:
        of_whole = whole[at] + half / 2 * whole[at + 1]
        return per * sum(each[at] + half / 2 * each[at + 1] for each in slowest) / of_whole if of_whole else 0.0

    forward, backward = halves
    own, later = ((share(at, forward), share(at, backward)) for at in (0, 2))
    works = [each.total(halves[0]) for each in slowest]
    of_whole = per / whole.total(halves[0])
    spread = statistics.pstdev(works) / statistics.fmean(works)
    return Shares(own, later, sum(works) * of_whole, sum(means) * of_whole, spread)


def _batched(values: Sequence[_Value], size: int) -> list[Sequence[_Value]]:
    return [values[at : at + size] for at in range(0, len(values), size)]


def _sum(loads: Iterable[Loads]) -> Loads:
    return Loads(*map(sum, zip(*loads, strict=True)))


def _busiest(rows: list[tuple[Loads, ...]], half_keys: float) -> Loads:
    return max((_sum(each) for each in zip(*rows, strict=True)), key=lambda each: each.total(half_keys))


@lru_cache(maxsize=256)
def deal_drawn(
    lengths: Lengths,
    sequence: int,
    ring_degrees: tuple[int, ...],
    ring: int,
    micro_batch: int,
    num_micros: int,
    cost: WorkCost,
) -> MeanDealt:
    """Means of drawn micro-steps of a context group; `ring` of its ring ranks share a data rank's rows."""
    num_ring_ranks, together = math.prod(ring_degrees), min(num_micros, _DEALT_TOGETHER)
    num_rows = micro_batch * num_ring_ranks // ring
    whole_s, share = micro_batch / ring * cost.whole_s(sequence), -(-micro_batch * sequence // ring)
    slowest, means, waits, seconds = list[float](), list[float](), list[float](), list[float]()
    sent = [0.0] * len(ring_degrees)
    for rows in drawn_micros(lengths, sequence, together * num_rows, max(2, 8 // together)):
        # Rows are dealt to the micro-batches of a step as a run deals them.
        costs = [sum(map(cost.whole_s, row)) for row in rows]
        for micro in micro_steps(costs, together):
            documents = [length for row in micro for length in rows[row]]
            dealt = deal(documents, ring_degrees, cost, ring_rank_capacity(documents, num_ring_ranks, share))
            last = max(range(num_ring_ranks), key=dealt.attention_s.__getitem__)
            slowest.append(dealt.computed_s[last] / whole_s)
            means.append(statistics.fmean(dealt.computed_s) / whole_s)
            waits.append(dealt.attention_s[last] - dealt.computed_s[last] + dealt.moved_s)
            seconds.append(dealt.attention_s[last] + dealt.moved_s)
            sent = [before + each for before, each in zip(sent, dealt.sent_bytes, strict=True)]
    return MeanDealt(
        slowest=statistics.fmean(slowest),
        mean=statistics.fmean(means),
        spread=statistics.pstdev(seconds) / statistics.fmean(seconds),
        wait_s=statistics.fmean(waits) / (cost.forwards + 1),
        sent_bytes=tuple(each / (len(seconds) * num_ring_ranks) for each in sent),
    )
