"""Pairs: which queries of a place see which keys of a round, as few kernel calls as do no work in vain.

A token sees itself and those before it in its document, with a sliding window of W the nearest W of these. Two runs of
tokens are either the same or apart, and then at most one document reaches from the one into the other:

    the same run    every document by itself, CAUSAL; neighbours that have at most 64 tokens together under one MASK;
                    one longer than the window in pieces of its length under a MASK that takes in the piece before
    apart           the queries that the document goes on to see all keys that it comes from: FULL. Under a window
                    keys and queries out of reach are dropped, and the rest is a MASK unless all see all

Where a shard's two runs see, or are seen by, the same tokens that is one pair: at even chunks a round of a ring is one.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from terrace.sequence.token_layout import Mask, Pair, PairKind, Run

# Documents that together are no longer are multiplied under one mask: terrace.model.attention has the measurements.
SHORT_PIECE = 64


class Stretch(NamedTuple):
    """Tokens `start` ... `stop` - 1, in rows from `row` on."""

    start: int
    stop: int
    row: int

    def rows(self, start: int, stop: int) -> Run:
        """Return the rows of tokens `start` ... `stop` - 1."""
        return self.row + start - self.start, self.row + stop - self.start


def pairs_within(stretches: Sequence[Stretch], documents: Sequence[int], window: int) -> Iterator[Pair]:
    """Yield the pairs of each stretch with itself; rows of the next stretch follow on those of the one before."""
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
    """Yield the rows of each document in each stretch."""
    for stretch in stretches:
        inside = documents[bisect_right(documents, stretch.start) : bisect_left(documents, stretch.stop)]
        start = stretch.start
        for stop in (*inside, stretch.stop):
            yield stretch.rows(start, stop)
            start = stop


def _group(group: Sequence[Run], window: int) -> Pair:
    """Return the pair of neighbouring short documents."""
    first, stop = group[0][0], group[-1][1]
    if len(group) == 1 and not 0 < window < stop - first:
        return Pair((first, stop), (first, stop), PairKind.CAUSAL)
    begins = tuple(start - first for start, _ in group[1:])
    return Pair((first, stop), (first, stop), PairKind.MASK, Mask(0, begins, window))


def _banded(start: int, stop: int, window: int) -> Iterator[Pair]:
    """Yield the pairs of a document longer than the window."""
    length = max(window, SHORT_PIECE)  # so that none sees beyond the piece before
    for begin in range(start, stop, length):
        end, first = min(begin + length, stop), max(begin - length, start)
        if end - first <= window:
            yield Pair((begin, end), (first, end), PairKind.CAUSAL)
        else:
            yield Pair((begin, end), (first, end), PairKind.MASK, Mask(begin - first, (), window))


def pairs_across(
    queries: Sequence[Stretch], keys: Sequence[Stretch], documents: Sequence[int], window: int
) -> Iterator[Pair]:
    """Yield the pairs of a shard's queries with keys of other chunks of the segment."""
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
    """Return the pair of two runs that are apart, if the queries come after and a document goes on to them."""
    if key.stop > query.start:
        return None
    at = bisect_left(documents, key.stop)  # the first that begins with none of the keys
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
    """Return one pair that does as much as two, if there is one."""
    if one.kind is not PairKind.FULL or other.kind is not PairKind.FULL:
        return None
    if one.keys == other.keys and one.queries[1] == other.queries[0]:
        return Pair((one.queries[0], other.queries[1]), one.keys, PairKind.FULL)
    if one.queries == other.queries and one.keys[1] == other.keys[0]:
        return Pair(one.queries, (one.keys[0], other.keys[1]), PairKind.FULL)
    return None
