"""Pairs of queries and keys in a round, in as few kernel calls as possible without wasted work.

A token attends to itself and earlier tokens in its document; under a sliding window of W, to the nearest W of these.
Two runs of tokens are either identical or disjoint; if disjoint, at most one document spans both:

    identical   every document by itself, CAUSAL; neighbours of at most 64 tokens together share one MASK; a document
                longer than the window is cut into pieces of its length, under a MASK that includes the previous piece
    disjoint    all queries of that document attend to all of its keys: FULL. Under a window,
                keys and queries out of reach are dropped, and the rest is a MASK unless all queries reach all keys

If the two runs of a shard have the same keys, or the same queries, they share one pair: with even chunks, a ring round
is a single pair.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrace.sequence.token_layout import Mask, Pair, PairKind, Run

# Documents with at most this many tokens in total share one mask; for measurements see terrace.model.attention.
SHORT_PIECE = 64


class Stretch(NamedTuple):
    """Tokens `start` ... `stop` - 1, in consecutive rows from `row`."""

    start: int
    stop: int
    row: int

    def rows(self, start: int, stop: int) -> Run:
        """Rows of tokens `start` ... `stop` - 1."""
        return self.row + start - self.start, self.row + stop - self.start


def pairs_within(stretches: Sequence[Stretch], documents: Sequence[int], window: int) -> Iterator[Pair]:
    """Pairs of each stretch with itself; the rows of all stretches are contiguous."""
    group: list[Run] = []  # rows of short documents
    for start, stop in _documents(stretches, documents):
        size = stop - start
        if group and stop - group[0][0] > SHORT_PIECE:
            yield _group(group, window)
            group = []
        if size <= SHORT_PIECE:
            group.append((start, stop))
        elif 0 < window < size:
            yield from _banded(start, stop, window)
        else:
            yield Pair((start, stop), (start, stop), PairKind.CAUSAL)
    if group:
        yield _group(group, window)


def _documents(stretches: Sequence[Stretch], documents: Sequence[int]) -> Iterator[Run]:
    for stretch in stretches:
        inside = documents[bisect_right(documents, stretch.start) : bisect_left(documents, stretch.stop)]
        start = stretch.start
        for stop in (*inside, stretch.stop):
            yield stretch.rows(start, stop)
            start = stop


def _group(group: Sequence[Run], window: int) -> Pair:
    first, stop = group[0][0], group[-1][1]
    if len(group) == 1 and not 0 < window < stop - first:
        return Pair((first, stop), (first, stop), PairKind.CAUSAL)
    begins = tuple(start - first for start, _ in group[1:])
    return Pair((first, stop), (first, stop), PairKind.MASK, Mask(0, begins, window))


def _banded(start: int, stop: int, window: int) -> Iterator[Pair]:
    length = max(window, SHORT_PIECE)  # so that no query sees beyond the previous piece
    for begin in range(start, stop, length):
        end, first = min(begin + length, stop), max(begin - length, start)
        if end - first <= window:
            yield Pair((begin, end), (first, end), PairKind.CAUSAL)
        else:
            yield Pair((begin, end), (first, end), PairKind.MASK, Mask(begin - first, (), window))


def pairs_across(
    queries: Sequence[Stretch], keys: Sequence[Stretch], documents: Sequence[int], window: int
) -> Iterator[Pair]:
    """Pairs of a shard's queries with keys of other chunks of its segment."""
    last: Pair | None = None
    for key in keys:
        for query in queries:
            pair = _across(query, key, documents, window)
            joined = last and pair and _joined(last, pair)
            if last and pair and not joined:
                yield last
            last = joined or pair or last
    if last:
        yield last


def _across(query: Stretch, key: Stretch, documents: Sequence[int], window: int) -> Pair | None:
    if key.stop > query.start:
        return None
    # Queries must come after the keys, and only the document that spans both gives pairs.
    at = bisect_left(documents, key.stop)  # the first document that begins after the keys
    first, stop = key.start, query.stop
    if at > 0:
        first = max(first, documents[at - 1])
    if at < len(documents):
        stop = min(stop, documents[at])
    if window:
        first, stop = max(first, query.start - window + 1), min(stop, key.stop + window - 1)
    if first >= key.stop or query.start >= stop:
        return None
    rows, seen = query.rows(query.start, stop), key.rows(first, key.stop)
    if window and stop - 1 - first >= window:
        return Pair(rows, seen, PairKind.MASK, Mask(query.start - first, (), window))
    return Pair(rows, seen, PairKind.FULL)


def _joined(one: Pair, other: Pair) -> Pair | None:
    if one.kind is not PairKind.FULL or other.kind is not PairKind.FULL:
        return None
    if one.keys == other.keys and one.queries[1] == other.queries[0]:
        return Pair((one.queries[0], other.queries[1]), one.keys, PairKind.FULL)
    if one.queries == other.queries and one.keys[1] == other.keys[0]:
        return Pair(one.queries, (one.keys[0], other.keys[1]), PairKind.FULL)
    return None
