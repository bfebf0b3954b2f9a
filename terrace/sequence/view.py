"""What one rank does for attention of one micro-batch: the tokens it holds, whom it sends what, what it multiplies.

A `Spread` is data, made on the host before the step (terrace.sequence.build); the runtime carries it out the same way
whatever it says (terrace.runtime.context), and bytes and seconds are read from it too. Of a layer's attention:

    into     queries, keys and values of the tokens that the rank holds go where they are attended to: other ranks of
             its place for other heads (Ulysses), other places (remapping, Zeppelin 2509.21841)
    rounds   round 0 works on the keys of the place itself; every later one on keys that its exchange has brought from
             the keys of the round before, sent on while that round computes (ring attention, 2310.01889)
    back     what attention made of the tokens returns: `into` the other way round

The backward does the same with gradients: the output's go `into`, keys pass through the same rounds again, the
gradients of the keys of a round go on with the next round's exchange or, from where keys were last needed, `home` to
the place that owns them, those of queries, keys and values `back`. Those of round 0 stay, since they are at home.

*Held rows* are the rank's tokens in the order of `tokens`, then padding up to `num_held`. *Attended rows* are those of
its place: queries of all rounds, keys of round 0. Rows of a later round are what its exchange brought. All runs are
half-open ranges (start, stop) of such rows; peers are members of the pool (terrace.plan.context.Pool).

Attended rows that nothing comes to, and queries in no pair, are padding: zero, and without gradient. Attended rows
whose keys go to another place come home once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

Run = tuple[int, int]


class Kind(StrEnum):
    """Which keys a query of a pair sees."""

    FULL = "full"  # all of them
    CAUSAL = "causal"  # as many tokens of each; those up to itself
    MASK = "mask"  # what `Pair.mask` says


@dataclass(frozen=True)
class Mask:
    """Query i stands at i + `shift` of the keys, and sees those up to there, of its document and its window alone.

    `begins` are the keys with which documents begin, rising; before the first it goes on with one. Both sides are
    neighbouring tokens. `window` 0: none.
    """

    shift: int
    begins: tuple[int, ...]
    window: int


@dataclass(frozen=True)
class Pair:
    """Attended rows whose queries see the keys of rows of the round."""

    queries: Run
    keys: Run
    kind: Kind
    mask: Mask | None = None  # of Kind.MASK


@dataclass(frozen=True)
class Exchange:
    """Rows that go to each peer, and where those of each peer go. One message for a peer; itself: rows that stay.

    In the order of peers. The rows of a message are those of its runs, one after the other.
    """

    sends: tuple[tuple[int, tuple[Run, ...]], ...]
    receives: tuple[tuple[int, tuple[Run, ...]], ...]


NOTHING = Exchange((), ())


@dataclass(frozen=True)
class Round:
    """Keys of `num_rows` rows, which `exchange` brought from those of the round before, and what sees them."""

    num_rows: int
    exchange: Exchange  # `NOTHING` of round 0
    pairs: tuple[Pair, ...]
    home: Exchange  # from rows not passed on to attended rows of the place that owns them; `NOTHING` of round 0


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One rank's part of a micro-batch."""

    member: int  # of the pool: this rank
    tokens: tuple[Run, ...]  # of the micro-batch, or with balance = "cost" of the global batch, row after row
    num_held: int
    num_attended: int
    into: Exchange  # from held rows to attended rows
    rounds: tuple[Round, ...]


def num_rows(runs: tuple[Run, ...]) -> int:
    """Return how many rows runs have together."""
    return sum(stop - start for start, stop in runs)


def merged_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Return the same rows in the same order: none of the runs empty, and neighbours in one."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def cut_runs(runs: Iterable[Run], start: int, stop: int) -> tuple[Run, ...]:
    """Return rows `start` ... `stop` - 1 of what runs have together, fewer if they end before."""
    cut = []
    for first, last in runs:
        size = last - first
        low, high = max(start, 0), min(stop, size)
        if low < high:
            cut.append((first + low, first + high))
        start, stop = start - size, stop - size
    return tuple(cut)
