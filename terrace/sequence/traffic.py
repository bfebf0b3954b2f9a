"""Rows and bytes that a `TokenLayout` sends, by leg and tier; a run's ledger must agree.

In elements of one head per row, for N query and K key-value heads of the model (of the rank's slice under a tensor
axis) and u Ulysses ranks, with kv = max(K / u, 1):

    leg                forward                   backward
    into               N/u + 2 kv: q, k, v       N/u: gradient of the output
    ring               2 kv: k, v                2 kv again
    gradients                                    2 kv: keys of a round but the first, with the exchange after it
    return_gradients                             2 kv: gradients
    back               N/u: output               N/u + 2 kv: gradients of q, k, v
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from terrace.plan.context import ContextGroup, Heads
from terrace.plan.wire import WireFormat
from terrace.sequence.token_layout import Exchange, TokenLayout, num_rows


@dataclass(frozen=True)
class SentRows:
    """Rows that a rank sends to others for one layer, by tier, innermost first."""

    into: tuple[int, ...]
    ring: tuple[int, ...]  # all rounds
    gradients: tuple[int, ...]  # all rounds
    return_gradients: tuple[int, ...]
    back: tuple[int, ...]


@dataclass(frozen=True)
class SentBytes:
    """Bytes that a rank sends to others for one layer, by tier, innermost first."""

    forward: tuple[int, ...]
    backward: tuple[int, ...]


def sent_rows(token_layout: TokenLayout, group: ContextGroup) -> SentRows:
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


def sent_bytes(
    token_layout: TokenLayout, group: ContextGroup, heads: Heads, wire: WireFormat | Sequence[WireFormat]
) -> SentBytes:
    """Bytes that the member sends; `heads` are all heads of a ring rank, `wire` one format or one per tier."""
    rows = sent_rows(token_layout, group)
    part = heads.per_ulysses_rank(group.ulysses)
    legs = list(zip(rows.into, rows.ring, rows.gradients, rows.return_gradients, rows.back, strict=True))
    wires = [wire] * len(legs) if isinstance(wire, WireFormat) else wire
    forward, backward = [], []
    for (into, ring, gradients, return_gradients, back), of_tier in zip(legs, wires, strict=True):
        # The codec encodes each row of each tensor separately.
        queries = of_tier.message_bytes(part.queries * part.size)
        keys = 2 * of_tier.message_bytes(part.keys * part.size)
        forward.append(into * (queries + keys) + ring * keys + back * queries)
        around = (ring + gradients + return_gradients) * keys
        backward.append(into * queries + around + back * (queries + keys))
    return SentBytes(forward=tuple(forward), backward=tuple(backward))


def _by_tier(exchanges: Iterable[Exchange], member: int, group: ContextGroup) -> tuple[int, ...]:
    rows = [0] * len(group.sizes)
    for exchange in exchanges:
        for peer, runs in exchange.sends:
            if peer != member:
                rows[group.tier(member, peer)] += num_rows(runs)
    return tuple(rows)
