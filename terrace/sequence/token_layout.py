"""One rank's part in attention for one micro-batch: its local tokens, its messages, and the pairs it computes.

A `TokenLayout` is plain data, built on the host before the step (terrace.sequence.build). The runtime executes any
layout in the same way (terrace.runtime.context); bytes and times are derived from it too. In one attention layer:

    into     queries, keys and values of local tokens go to the ranks that attend to them: to the Ulysses ranks of the
             same ring rank, split by heads, or to other ring ranks (remapping, Zeppelin 2509.21841)
    rounds   round 0 uses the ring rank's own keys; the exchange of every later round brings keys from the round before,
             sent while that round computes (ring attention, 2310.01889)
    back     outputs return to the ranks that hold the tokens: `into` reversed

The backward sends output gradients `into`, and keys through the same rounds again. Key gradients of a round are sent
with the next round's exchange, or, if its keys are not passed on, with `return_gradients` to the ring rank that owns
them. Gradients of round 0 stay on the rank. Gradients of queries, keys and values go `back`.

*Local tokens* are the rank's tokens in the order of `tokens`, padded to `num_local_tokens` rows. *Attention tokens* are
the rows of its ring rank: queries of all rounds and keys of round 0. Rows of a later round come from its exchange. All
runs are half-open ranges (start, stop) of rows; peers are members of the context group
(terrace.plan.context.ContextGroup).

Attention rows that receive no tokens, and queries in no pair, are padding: zero, without gradient. If an attention
row's keys are sent to another ring rank, their gradients return exactly once.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

Run = tuple[int, int]


class PairKind(StrEnum):
    """Which keys of a pair a query attends to."""

    FULL = "full"  # all keys
    CAUSAL = "causal"  # as many keys as queries; keys up to the query's index
    MASK = "mask"  # as `Pair.mask` says


@dataclass(frozen=True)
class Mask:
    """Query i is at key index i + `shift` and attends to keys up to there, within its document and window.

    `begins` are the ascending key indices at which documents begin; the first document may have begun earlier. Queries
    and keys are each contiguous tokens. `window` 0 means none.
    """

    shift: int
    begins: tuple[int, ...]
    window: int


@dataclass(frozen=True)
class Pair:
    """A kernel call: attention rows of queries, and rows of keys in the round."""

    queries: Run
    keys: Run
    kind: PairKind
    mask: Mask | None = None  # only for PairKind.MASK


@dataclass(frozen=True)
class Exchange:
    """Rows sent to and received from each peer: one message per peer, ordered by peer.

    Rows for the rank itself stay there. The rows of a message are its concatenated runs.
    """

    sends: tuple[tuple[int, tuple[Run, ...]], ...]
    receives: tuple[tuple[int, tuple[Run, ...]], ...]


NOTHING = Exchange((), ())


@dataclass(frozen=True)
class Round:
    """`num_rows` rows of keys, received with `exchange` during the previous round, and the pairs that read them.

    `other_pairs` are those of layers with `other_windows`, in that order; all layers send the same rows.
    """

    num_rows: int
    exchange: Exchange  # `NOTHING` in round 0
    pairs: tuple[Pair, ...]
    return_gradients: Exchange  # of rows not passed on, to their owner's attention rows; `NOTHING` in round 0
    other_pairs: tuple[tuple[Pair, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class TokenLayout:
    """One rank's part of a micro-batch."""

    member: int  # this rank's index in the context group
    tokens: tuple[Run, ...]  # of the micro-batch, or with balance = "cost" of the global batch, row after row
    num_local_tokens: int
    num_attention_tokens: int
    into: Exchange  # from local rows to attention rows
    rounds: tuple[Round, ...]


def num_rows(runs: tuple[Run, ...]) -> int:
    return sum(stop - start for start, stop in runs)


def merged_runs(runs: Iterable[Run]) -> tuple[Run, ...]:
    """The same rows in the same order; empty runs are dropped and adjacent ones merged."""
    merged: list[Run] = []
    for start, stop in runs:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        elif start < stop:
            merged.append((start, stop))
    return tuple(merged)


def cut_runs(runs: Iterable[Run], start: int, stop: int) -> tuple[Run, ...]:
    """Rows `start` ... `stop` - 1 of the concatenated runs; fewer if the runs end before `stop`."""
    cut = []
    for first, last in runs:
        size = last - first
        low, high = max(start, 0), min(stop, size)
        if low < high:
            cut.append((first + low, first + high))
        start, stop = start - size, stop - size
    return tuple(cut)
