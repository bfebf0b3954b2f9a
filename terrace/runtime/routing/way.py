"""Rows of a chunk of tokens on their way to experts and back, one hop after the other.

    there   a row goes to every unit of a tier that has one of its experts
    back    the result of a row goes where the row came from, and is summed there

In a forward tokens go there and results come back; in a backward gradients of results go there, and gradients of tokens
come back. Rows arrive in the order of the peers, and are added up in that order, in fp32 at least: no sum depends on
when a message comes.

A row is coded by itself in the format of its class and tier, so its rounding depends on no other row. Toward experts it
is coded once for neighbouring hops of one format, which pass the codes on; a rank's own rows are rounded too, so
that an expert sees the same row anywhere. Back from them the rows that leave a rank are coded anew at each hop, and its
own enter the sum as they are. Weights, their gradients and choices are never coded.

A chunk is one or several *pieces* of the tokens, neighbours in a micro-batch: a chunk of a forward may be several of a
backward, or the other way round. Rows lie piece after piece, and in a message piece after piece for each peer.

Shape legend: T tokens, N rows that arrive at a rank, H hidden, k experts of a token, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from terrace.comm.byte_views import as_bytes
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass, WireFormat
from terrace.runtime.routing.route import HopRows


class Carrier(Protocol):
    """Sends rows to the peers of a hop."""

    def wire(self, message: RoutedMessage) -> WireFormat:
        """The format of the rows of a message."""

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        """Rows (n, H) in that format, (n, bytes)."""

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows (n, H) of their codes (n, bytes)."""

    def exchange(self, message: RoutedMessage, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Bytes received for `sent` (n, bytes), both in the order of the peers, with numbers of rows for each."""


@dataclass
class Way:
    """The route of one piece of a micro-batch through one layer, and, once its tokens have gone it, which rows went
    where.

    `units` is the experts (first, last + 1) of the units of each hop, by peer; none where every row goes to every peer.
    """

    tokens: int
    hops: tuple[HopRows, ...]
    units: tuple[tuple[tuple[int, int], ...], ...]
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)  # by hop, the rows that each peer got

    def held(self, number: int) -> int:
        """Rows on the rank before hop `number`; after the last, those that arrive."""
        return sum(self.hops[number - 1].receives) if number else self.tokens


class Chunk:
    """Rows of some pieces, there or on their way; every hop is one message, whose work runs on its lane.

    `parts` (n, ...) are elements (H), then in a forward weights (k) and choices (k), or in a backward on the way back
    gradients of weights.
    """

    def __init__(self, carrier: Carrier, ways: Sequence[Way], parts: Sequence[Tensor]) -> None:
        self.parts, self._carrier, self._ways = tuple(parts), carrier, ways
        self._dtypes = [part.dtype for part in parts]
        self._last: RoutedMessage | None = None  # of the codes that the elements are in
        self._passed: list[tuple[Tensor, ...]] = []

    def turn(self, parts: Sequence[Tensor]) -> None:
        """Take the results of the rows that arrived, to be brought back."""
        self.parts, self._dtypes = tuple(parts), [part.dtype for part in parts]

    def go(self, message: RoutedMessage) -> None:
        """The hop of a message; on CUDA the tensors that its work has read stay until `arrived`."""
        self._passed.append(self.parts)
        number = next(
            number
            for number, hop in enumerate(self._ways[0].hops)
            if (hop.tier, hop.copies) == (message.tier, message.copies)
        )
        (self._there if message.message_class is MessageClass.DISPATCH else self._back)(number, message)

    def arrived(self) -> None:
        """Drop the tensors that messages have read: the computation has waited for them."""
        self._passed.clear()

    def pieces(self) -> list[list[Tensor]]:
        """The rows that have arrived, of each piece."""
        sizes = [way.held(len(way.hops)) for way in self._ways]
        return [list(each) for each in zip(*(torch.split(part, sizes) for part in self.parts), strict=True)]

    def _there(self, number: int, message: RoutedMessage) -> None:
        rows, *others = self.parts
        last, hops = self._last, self._hops(number)
        if last is None or self._carrier.wire(last) != self._carrier.wire(message):
            held = rows if last is None else self._carrier.read(last, rows, self._dtypes[0])
            rows = self._carrier.code(message, held)
        if not message.backward:
            choices = torch.split(others[1], [way.held(number) for way in self._ways])
            for way, experts, hop in zip(self._ways, choices, hops, strict=True):
                way.rows.append(_wanted(experts, hop, way.units[number]))
        parts = (rows, *others)
        packed, index = _packed(parts), self._index(number)
        own = hops[0].position
        sent = packed.index_select(0, torch.cat([each for peer, each in enumerate(index) if peer != own]))
        counts = self._counts([hop.sends for hop in hops], own), self._counts([hop.receives for hop in hops], own)
        received = self._carrier.exchange(message, sent, *counts)
        arrived = self._by_peer(received, packed.index_select(0, index[own]), [hop.receives for hop in hops], own)
        rows, *others = _unpacked(torch.cat([each for piece in zip(*arrived, strict=True) for each in piece]), parts)
        self._last = message
        if number == len(self._ways[0].hops) - 1:
            rows, self._last = self._carrier.read(message, rows, self._dtypes[0]), None
        self.parts = (rows, *others)

    def _back(self, number: int, message: RoutedMessage) -> None:
        hops, index = self._hops(number), self._index(number)
        own = hops[0].position
        # Piece after piece, the rows of each peer.
        sizes = [size for hop in hops for size in hop.receives]
        slices = [torch.split(part, sizes) for part in self.parts]
        num_peers = len(hops[0].sends)

        def of(part: Sequence[Tensor], peer: int) -> list[Tensor]:
            return list(part[peer::num_peers])

        leaving, *others = (
            torch.cat([each for peer in range(num_peers) if peer != own for each in of(part, peer)]) for part in slices
        )
        like = self._carrier.code(message, leaving), *others
        counts = self._counts([hop.receives for hop in hops], own), self._counts([hop.sends for hop in hops], own)
        received = self._carrier.exchange(message, _packed(like), *counts)
        coded, *others = _unpacked(received, like)
        arrived = self._carrier.read(message, coded, _wide(self.parts[0].dtype)), *others
        held, found = sum(way.held(number) for way in self._ways), []
        starts = [0, *accumulate(counts[1])]
        for there, here in zip(arrived, slices, strict=True):
            total = there.new_zeros(held, there.shape[1], dtype=_wide(here[0].dtype))
            for peer, rows in enumerate(index):
                values = torch.cat(of(here, peer)) if peer == own else there[starts[peer] : starts[peer + 1]]
                # A peer got a row once, so no two additions meet.
                total.index_add_(0, rows, values.to(total.dtype))
            found.append(total)
        if number == 0:
            found = [part.to(dtype) for part, dtype in zip(found, self._dtypes, strict=True)]
        self.parts = tuple(found)

    def _hops(self, number: int) -> list[HopRows]:
        return [way.hops[number] for way in self._ways]

    def _index(self, number: int) -> list[Tensor]:
        """By peer, its rows among all of the chunk before a hop."""
        if len(self._ways) == 1:
            return list(self._ways[0].rows[number])
        starts = [0, *accumulate(way.held(number) for way in self._ways)]
        moved = ([rows + start for rows in way.rows[number]] for way, start in zip(self._ways, starts, strict=False))
        return [torch.cat(each) for each in zip(*moved, strict=True)]

    @staticmethod
    def _counts(numbers: Sequence[Sequence[int]], own: int) -> list[int]:
        return [0 if peer == own else sum(each) for peer, each in enumerate(zip(*numbers, strict=True))]

    @staticmethod
    def _by_peer(
        received: Tensor, own_rows: Tensor, numbers: Sequence[Sequence[int]], own: int
    ) -> list[tuple[Tensor, ...]]:
        """By peer, the rows of each piece."""
        found, start = [], 0
        for peer, sizes in enumerate(zip(*numbers, strict=True)):
            if peer == own:
                found.append(torch.split(own_rows, list(sizes)))
            else:
                found.append(torch.split(received[start : start + sum(sizes)], list(sizes)))
                start += sum(sizes)
        return found


def _wanted(experts: Tensor, hop: HopRows, units: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """The rows of `experts` (n, k) that each peer gets."""
    if hop.copies:
        return (_places((experts >= 0).any(1), hop.sends[0]),) * len(hop.sends)
    wanted = [((experts >= first) & (experts < last)).any(1) for first, last in units]
    return tuple(map(_places, wanted, hop.sends))


def _places(wanted: Tensor, number: int) -> Tensor:
    """Indexes of the `number` true elements of `wanted` (n)."""
    if wanted.is_cuda:
        # The route has counted them: the host, which may be issuing messages on a lane, need not wait for the device.
        return torch.nonzero_static(wanted, size=number).squeeze(1)
    found = wanted.nonzero().squeeze(1)
    assert len(found) == number, "a route counts the rows that are sent"
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of each row of all parts, one after the other."""
    views = [as_bytes(part) for part in parts]
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
