"""What a TokenLayout sends, by leg and tier: what the ledger of a run must show.

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

from terrace.plan.context import ContextGroup, Heads
from terrace.sequence.token_layout import Exchange, TokenLayout, num_rows


@dataclass(frozen=True)
class SentRows:
    """Rows that a rank sends to others for one layer, by tier of the cluster, innermost first."""

    into: tuple[int, ...]
    ring: tuple[int, ...]  # of all rounds
    gradients: tuple[int, ...]  # of all rounds
    return_gradients: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends to others for one layer, by tier of the cluster, innermost first."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def sent_rows(token_layout: TokenLayout, group: ContextGroup) -> SentRows:
    """Return the rows that the member sends."""
    back = Exchange(token_layout.into.receives, token_layout.into.sends)
    return SentRows(
        into=_by_tier([token_layout.into], token_layout.member, group),
        ring=_by_tier((round_.exchange for round_ in token_layout.rounds), token_layout.member, group),
        gradients=_by_tier((round_.exchange for round_ in token_layout.rounds[2:]), token_layout.member, group),
        return_gradients=_by_tier(
            (round_.return_gradients for round_ in token_layout.rounds), token_layout.member, group
        ),
        back=_by_tier([back], token_layout.member, group),
    )


def sent_bytes(token_layout: TokenLayout, group: ContextGroup, heads: Heads, item_bytes: int) -> SentBytes:
    """Return the bytes that the member sends; heads are those before they are divided among the parts of a place."""
    rows = sent_rows(token_layout, group)
    part = heads.per_ulysses_rank(group.ulysses)
    queries, keys, head_bytes = part.queries, 2 * part.keys, part.size * item_bytes
    legs = list(zip(rows.into, rows.ring, rows.gradients, rows.return_gradients, rows.back, strict=True))
    return SentBytes(
        forward=tuple(
            head_bytes * (into * (queries + keys) + ring * keys + back * queries) for into, ring, _, _, back in legs
        ),
        backward=tuple(
            head_bytes * (into * queries + (ring + gradients + return_gradients) * keys + back * (queries + keys))
            for into, ring, gradients, return_gradients, back in legs
        ),
    )


def _by_tier(exchanges: Iterable[Exchange], member: int, group: ContextGroup) -> tuple[int, ...]:
    """Return the rows that exchanges send to others, by tier."""
    rows = [0] * len(group.sizes)
    for exchange in exchanges:
        for peer, runs in exchange.sends:
            if peer != member:
                rows[group.tier(member, peer)] += num_rows(runs)
    return tuple(rows)
