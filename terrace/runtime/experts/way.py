"""The way of a micro-batch's tokens to their experts and back, over the hops of a route, as autograd functions.

    toward   a row goes to every unit of a tier that has one of its experts; its gradients come back and are summed
    back     results of a row come back and are summed; their gradient goes the same way as the rows did

Rows arrive in the order of the peers, and results are added up in that order, in fp32 at least: no sum depends on when
a message comes.

Shape legend: T tokens, N rows that arrive at a rank, H hidden, k experts of a token, E experts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.wire import MessageClass
from terrace.runtime.experts.route import HopRows

# (message, hop, rows to send, numbers of rows for each peer, and from each) -> rows received
Exchange = Callable[[ExpertMessage, HopRows, Tensor, Sequence[int], Sequence[int]], Tensor]


@dataclass
class Way:
    """The route of one micro-batch through one layer, and, once the tokens have gone it, which rows went where.

    `units` is the experts (first, last + 1) of the units of each hop, by peer; none where every row goes to every peer.
    """

    hops: tuple[HopRows, ...]
    units: tuple[tuple[tuple[int, int], ...], ...]
    exchange: Exchange
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)  # by hop, the rows that each peer got
    held: list[int] = field(default_factory=list)  # by hop, how many rows there were


def toward(tokens: Tensor, weights: Tensor, experts: Tensor, way: Way) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens (T, H), weights (T, k) and choices (T, k) to the rows (N, H), (N, k), (N, k) that arrive here."""
    rows, of_rows, choices = _Toward.apply(tokens, weights, experts.int(), way)  # type: ignore[no-untyped-call]
    return rows, of_rows, choices.long()


def back(rows: Tensor, way: Way) -> Tensor:
    """Results of rows (N, H), summed over ranks where each token came from: (T, H)."""
    result: Tensor = _Back.apply(rows, way)  # type: ignore[no-untyped-call]
    return result


class _Toward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, way: Way) -> tuple[Tensor, ...]:
        ctx.way = way
        parts: tuple[Tensor, ...] = (tokens, weights, experts)
        for hop, units in zip(way.hops, way.units, strict=True):
            way.held.append(len(parts[0]))
            way.rows.append(_wanted(parts[2], hop, units))
            parts = _over(way, len(way.rows) - 1, parts, backward=False)
        ctx.mark_non_differentiable(parts[2])
        # A way without hops hands its inputs on, which a function may not return.
        return parts if way.hops else tuple(part.clone() for part in parts)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor, _: Any) -> tuple[Tensor, Tensor, None, None]:
        tokens, of_tokens = _returned(ctx.way, (rows, weights), backward=True)
        return tokens, of_tokens, None, None


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way) -> Tensor:
        ctx.way = way
        (result,) = _returned(way, (rows,), backward=False)
        return result if way.hops else result.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        parts: tuple[Tensor, ...] = (gradient,)
        for number in range(len(ctx.way.hops)):
            parts = _over(ctx.way, number, parts, backward=True)
        return parts[0], None


def _wanted(experts: Tensor, hop: HopRows, units: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The rows of `experts` (n, k) that each peer gets."""
    if hop.copies:
        return (torch.arange(len(experts), device=experts.device),) * len(hop.sends)
    found = []
    for first, last in units:
        has = ((experts >= first) & (experts < last)).any(1)
        found.append(has.nonzero().squeeze(1))
    return tuple(found)


def _over(way: Way, number: int, parts: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
    """`parts` (n, ...) of the rows held, of which each peer gets its own, as the parts of the rows that arrive."""
    hop, rows = way.hops[number], way.rows[number]
    assert tuple(map(len, rows)) == hop.sends, "a route counts the rows that are sent"
    packed = _packed(parts)
    others = [each for peer, each in enumerate(rows) if peer != hop.position]
    sends, receives = _without_own(hop, hop.sends), _without_own(hop, hop.receives)
    sent = packed.index_select(0, torch.cat(others))
    message = ExpertMessage(MessageClass.DISPATCH, hop.tier, hop.copies, backward)
    received = way.exchange(message, hop, sent, sends, receives)
    own = packed.index_select(0, rows[hop.position])
    before = sum(receives[: hop.position])
    return _unpacked(torch.cat([received[:before], own, received[before:]]), parts)


def _returned(way: Way, parts: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
    """`parts` of the rows that arrived, back to where they came from and summed there, hop by hop."""
    for hop, rows, held in reversed(list(zip(way.hops, way.rows, way.held, strict=True))):
        packed = _packed(parts)
        first = sum(hop.receives[: hop.position])
        last = first + hop.receives[hop.position]
        sends, receives = _without_own(hop, hop.receives), _without_own(hop, hop.sends)
        sent = torch.cat([packed[:first], packed[last:]])
        message = ExpertMessage(MessageClass.COMBINE, hop.tier, hop.copies, backward)
        received = way.exchange(message, hop, sent, sends, receives)
        from_others, own = _unpacked(received, parts), [part[first:last] for part in parts]
        starts = [sum(receives[:peer]) for peer in range(len(rows) + 1)]
        found = []
        for others, mine in zip(from_others, own, strict=True):
            total = mine.new_zeros(held, mine.shape[1], dtype=torch.promote_types(mine.dtype, torch.float32))
            for peer, index in enumerate(rows):
                values = mine if peer == hop.position else others[starts[peer] : starts[peer + 1]]
                # A peer got a row once, so no two additions meet.
                total.index_add_(0, index, values.to(total.dtype))
            found.append(total.to(mine.dtype))
        parts = found
    return tuple(parts)


def _without_own(hop: HopRows, numbers: Sequence[int]) -> list[int]:
    return [0 if peer == hop.position else number for peer, number in enumerate(numbers)]


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of each row of all parts, one after the other."""
    views = [part.contiguous().view(torch.uint8) for part in parts]
    return views[0] if len(views) == 1 else torch.cat(views, 1)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    found, start = [], 0
    for part in like:
        size = part.shape[1] * part.element_size()
        found.append(packed[:, start : start + size].clone(memory_format=torch.contiguous_format).view(part.dtype))
        start += size
    return tuple(found)
