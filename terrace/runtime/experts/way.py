"""The way of a micro-batch's tokens to their experts and back, over the hops of a route, as autograd functions.

    toward   a row goes to every unit of a tier that has one of its experts; its gradients come back and are summed
    back     results of a row come back and are summed; their gradient goes the same way as the rows did

Rows arrive in the order of the peers, and results are added up in that order, in fp32 at least: no sum depends on when
a message comes.

A row is coded by itself in the format of its class and tier, so its rounding depends on no other row. Toward experts it
is coded once for neighbouring hops of one format, which pass the codes on; a rank's own rows are rounded too, so
that an expert sees the same row anywhere. Back from them the rows that leave a rank are coded anew at each hop, and its
own enter the sum as they are. Weights, their gradients and choices are never coded.

Shape legend: T tokens, N rows that arrive at a rank, H hidden, k experts of a token, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from terrace.plan.in_block_messages import ExpertMessage
from terrace.plan.wire import MessageClass, WireFormat
from terrace.runtime.experts.route import HopRows


class Carrier(Protocol):
    """Sends rows to the peers of a hop."""

    def wire(self, message: ExpertMessage) -> WireFormat:
        """The format of the rows of a message."""

    def code(self, message: ExpertMessage, rows: Tensor) -> Tensor:
        """Rows (n, H) in that format, (n, bytes)."""

    def read(self, message: ExpertMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (n, H) of their codes (n, bytes)."""

    def exchange(
        self, message: ExpertMessage, hop: HopRows, sent: Tensor, sends: Sequence[int], receives: Sequence[int]
    ) -> Tensor:
        """Bytes received for `sent` (n, bytes), both in the order of the peers, with numbers of rows for each."""


@dataclass
class Way:
    """The route of one micro-batch through one layer, and, once the tokens have gone it, which rows went where.

    `units` is the experts (first, last + 1) of the units of each hop, by peer; none where every row goes to every peer.
    """

    hops: tuple[HopRows, ...]
    units: tuple[tuple[tuple[int, int], ...], ...]
    carrier: Carrier
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
        parts = _sent(way, (tokens, weights, experts), backward=False)
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
        return _sent(ctx.way, (gradient,), backward=True)[0], None


def _wanted(experts: Tensor, hop: HopRows, units: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The rows of `experts` (n, k) that each peer gets."""
    if hop.copies:
        return ((experts >= 0).any(1).nonzero().squeeze(1),) * len(hop.sends)
    found = []
    for first, last in units:
        has = ((experts >= first) & (experts < last)).any(1)
        found.append(has.nonzero().squeeze(1))
    return tuple(found)


def _sent(way: Way, parts: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
    """Parts of the rows that arrive, from `parts` (n, ...) of those held: elements, then weights and choices."""
    rows, *others = parts
    dtype, last = rows.dtype, None
    for number, (hop, units) in enumerate(zip(way.hops, way.units, strict=True)):
        message = ExpertMessage(MessageClass.DISPATCH, hop.tier, hop.copies, backward)
        if last is None or way.carrier.wire(last) != way.carrier.wire(message):
            held = rows if last is None else way.carrier.read(last, rows, dtype)
            rows = way.carrier.code(message, held)
        last = message
        if not backward:
            way.held.append(len(rows))
            way.rows.append(_wanted(others[1], hop, units))
        rows, *others = _over(way, number, message, (rows, *others))
    return (rows if last is None else way.carrier.read(last, rows, dtype), *others)


def _over(way: Way, number: int, message: ExpertMessage, parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """`parts` (n, ...) of the rows held, of which each peer gets its own, as the parts of the rows that arrive."""
    hop, rows = way.hops[number], way.rows[number]
    assert tuple(map(len, rows)) == hop.sends, "a route counts the rows that are sent"
    packed = _packed(parts)
    others = [each for peer, each in enumerate(rows) if peer != hop.position]
    sends, receives = _without_own(hop, hop.sends), _without_own(hop, hop.receives)
    sent = packed.index_select(0, torch.cat(others))
    received = way.carrier.exchange(message, hop, sent, sends, receives)
    own = packed.index_select(0, rows[hop.position])
    before = sum(receives[: hop.position])
    return _unpacked(torch.cat([received[:before], own, received[before:]]), parts)


def _returned(way: Way, parts: Sequence[Tensor], *, backward: bool) -> tuple[Tensor, ...]:
    """`parts` of the rows that arrived, back to where they came from and summed there, hop by hop."""
    dtypes = [part.dtype for part in parts]
    for hop, rows, held in reversed(list(zip(way.hops, way.rows, way.held, strict=True))):
        message = ExpertMessage(MessageClass.COMBINE, hop.tier, hop.copies, backward)
        first = sum(hop.receives[: hop.position])
        last = first + hop.receives[hop.position]
        sends, receives = _without_own(hop, hop.receives), _without_own(hop, hop.sends)
        leaving, *others = (torch.cat([part[:first], part[last:]]) for part in parts)
        like = way.carrier.code(message, leaving), *others
        received = way.carrier.exchange(message, hop, _packed(like), sends, receives)
        coded, *others = _unpacked(received, like)
        arrived = way.carrier.read(message, coded, _wide(parts[0].dtype)), *others
        starts = [sum(receives[:peer]) for peer in range(len(rows) + 1)]
        found = []
        for there, here in zip(arrived, (part[first:last] for part in parts), strict=True):
            total = here.new_zeros(held, here.shape[1], dtype=_wide(here.dtype))
            for peer, index in enumerate(rows):
                values = here if peer == hop.position else there[starts[peer] : starts[peer + 1]]
                # A peer got a row once, so no two additions meet.
                total.index_add_(0, index, values.to(total.dtype))
            found.append(total)
        parts = found
    return tuple(part.to(dtype) for part, dtype in zip(parts, dtypes, strict=True))


def _without_own(hop: HopRows, numbers: Sequence[int]) -> list[int]:
    return [0 if peer == hop.position else number for peer, number in enumerate(numbers)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of each row of all parts, one after the other."""
    views = [part.contiguous().view(torch.uint8) for part in parts]
    return views[0] if len(views) == 1 else torch.cat(views, 1)


def _unpacked(packed: Tensor, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
    if len(like) == 1:
        return (packed.view(like[0].dtype),)
    found, start = [], 0
    for part in like:
        size = part.shape[1] * part.element_size()
        found.append(packed[:, start : start + size].clone(memory_format=torch.contiguous_format).view(part.dtype))
        start += size
    return tuple(found)
