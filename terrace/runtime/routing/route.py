"""Row counts of every hop to the experts and back, from token counts of all ranks, without reading any buffer.

A token crosses a tier once for every unit of the tier that has one of its experts, the outermost tier first. So a
rank counts its tokens for each *prefix* of units: (u_1), then (u_1, u_2), and so on, u_1 on the outermost tier. From
the counts of all ranks, every rank computes all split sizes, and the bytes declared are exactly those sent.

Before hop j, a rank at (c_1, ..., c_m) holds tokens of the ranks that differ from it only on the tiers outside, those
that go to its units there. To peer u on tier j it sends

    sum over s_1 .. s_(j-1) of   count of rank (s_1, .., s_(j-1), c_j, .., c_m) for prefix (c_1, .., c_(j-1), u)

If every expert is split over rows, each of its ranks needs all tokens that arrived at any of them: further hops
follow, in which every row goes to every peer. The way back uses the same counts in the opposite direction.

Shape legend: T tokens, k experts of a token; d_1 .. d_m degrees of the expert axis and w_1 .. w_q of the rows, the
outermost tier first.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class HopRows:
    """Rows that a rank sends to and receives from each peer of one hop. Its own rows, which stay, count in both."""

    tier: int
    copies: bool  # whether every row goes to every peer
    position: int  # of this rank among the peers
    sends: tuple[int, ...]
    receives: tuple[int, ...]

    @property
    def sent(self) -> int:
        """Rows sent to other ranks on the way to the experts."""
        return sum(self.sends) - self.sends[self.position]

    @property
    def returned(self) -> int:
        """Rows received from other ranks, which are sent back on the way back."""
        return sum(self.receives) - self.receives[self.position]


Route = tuple[HopRows, ...]  # the hops on the way of some tokens to their experts, and back


def count_prefixes(experts: Tensor, num_experts: int, degrees: Sequence[int]) -> Tensor:
    """Number of tokens with an expert in each prefix of units, int64, concatenated by prefix length.

    The first counts the empty prefix: tokens with any expert. `experts` (T, k) are the choices, -1 for none;
    `degrees` d_1 .. d_m successively divide the experts.
    """
    none, units = experts < 0, 1
    counts = [(~none).any(1).sum().view(1)]
    for degree in degrees:
        units *= degree
        unit_of = (experts // (num_experts // units)).masked_fill(none, units)  # (T, k); index `units` is for no expert
        has = torch.zeros(len(experts), units + 1, dtype=torch.bool, device=experts.device).scatter_(1, unit_of, True)
        counts.append(has[:, :units].sum(0))
    return torch.cat(counts)


def route_of(
    table: Tensor, tiers: Sequence[Sequence[int]], degrees: Sequence[Sequence[int]], places: Sequence[Sequence[int]]
) -> Route:
    """The hops of the rank at `places`, from the counts of all ranks, `table` (d_1 .. d_m w_1 .. w_q, prefixes).

    `tiers`, `degrees` and `places` each hold those of the expert axis, then of the rows, outermost tier first.
    """
    (expert_tiers, row_tiers), (wide, rows), (here, row) = tiers, degrees, places
    ranks = (*wide, *rows)
    hops, start, units = list[HopRows](), 1, 1
    held = table[:, 0].view(ranks)  # tokens of each rank that go to the units of this one so far
    for level, (tier, degree) in enumerate(zip(expert_tiers, wide, strict=True)):
        units *= degree
        counts = table[:, start : start + units].view(*ranks, *wide[: level + 1])
        start += units
        # Of the sources that this rank holds tokens of, for each unit u of the tier.
        inner = (*here[level:], *row)
        sends = _at(counts, *_every(level), *inner, *here[:level]).reshape(-1, degree).sum(0)
        held = _at(counts, *_every(len(ranks)), *here[: level + 1])
        receives = _at(held, *_every(level + 1), *inner[1:]).reshape(-1, degree).sum(0)
        hops.append(_hop(tier, False, here[level], sends, receives))
    arrived = held.reshape(-1, math.prod(rows)).sum(0).view(tuple(rows))
    for level, (tier, degree) in enumerate(zip(row_tiers, rows, strict=True)):
        receives = _at(arrived, *_every(level + 1), *row[level + 1 :]).reshape(-1, degree).sum(0)
        own = receives[row[level]].expand(degree)
        hops.append(_hop(tier, True, row[level], own, receives))
    return tuple(hops)


def _at(counts: Tensor, *index: int | slice) -> Tensor:
    return counts[index]


def _every(dims: int) -> tuple[slice, ...]:
    return (slice(None),) * dims


def _hop(tier: int, copies: bool, position: int, sends: Tensor, receives: Tensor) -> HopRows:
    return HopRows(tier, copies, position, tuple(sends.tolist()), tuple(receives.tolist()))
