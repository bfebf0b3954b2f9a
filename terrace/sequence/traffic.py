"""What a Spread sends, by leg and tier: what the ledger of a run must show.

A row of a leg is so many heads of a part, N query and K key-value heads of the model (of the rank's slice, under a
tensor axis) over u parts, kv = max(K / u, 1):

    leg         forward                   backward
    into        N/u + 2 kv: q, k, v       N/u: gradient of the output
    ring        2 kv: k, v                2 kv again
    gradients                             2 kv: of keys of a round but the first, with the exchange after it
    home                                  2 kv: gradients
    back        N/u: output               N/u + 2 kv: gradients of q, k, v
"""

from collections.abc import Iterable
from dataclasses import dataclass

from terrace.plan.context import Heads, Pool
from terrace.sequence.view import Exchange, Spread, num_rows


@dataclass(frozen=True)
class SentRows:
    """Rows that a rank sends to others for one layer, by tier of the cluster, innermost first."""

    into: tuple[int, ...]
    ring: tuple[int, ...]  # of all rounds
    gradients: tuple[int, ...]  # of all rounds
    home: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends to others for one layer, by tier of the cluster, innermost first."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def sent_rows(spread: Spread, pool: Pool) -> SentRows:
    """Return the rows that the member sends."""
    back = Exchange(spread.into.receives, spread.into.sends)
    return SentRows(
        into=_by_tier([spread.into], spread.member, pool),
        ring=_by_tier((round_.exchange for round_ in spread.rounds), spread.member, pool),
        gradients=_by_tier((round_.exchange for round_ in spread.rounds[2:]), spread.member, pool),
        home=_by_tier((round_.home for round_ in spread.rounds), spread.member, pool),
        back=_by_tier([back], spread.member, pool),
    )


def sent_bytes(spread: Spread, pool: Pool, heads: Heads, item_bytes: int) -> SentBytes:
    """Return the bytes that the member sends; heads are those before they are divided among the parts of a place."""
    rows = sent_rows(spread, pool)
    part = heads.of_part(pool.ulysses)
    queries, keys, head_bytes = part.queries, 2 * part.keys, part.size * item_bytes
    legs = list(zip(rows.into, rows.ring, rows.gradients, rows.home, rows.back, strict=True))
    return SentBytes(
        forward=tuple(
            head_bytes * (into * (queries + keys) + ring * keys + back * queries) for into, ring, _, _, back in legs
        ),
        backward=tuple(
            head_bytes * (into * queries + (ring + gradients + home) * keys + back * (queries + keys))
            for into, ring, gradients, home, back in legs
        ),
    )


def _by_tier(exchanges: Iterable[Exchange], member: int, pool: Pool) -> tuple[int, ...]:
    """Return the rows that exchanges send to others, by tier."""
    rows = [0] * len(pool.sizes)
    for exchange in exchanges:
        for peer, runs in exchange.sends:
            if peer != member:
                rows[pool.tier(member, peer)] += num_rows(runs)
    return tuple(rows)
