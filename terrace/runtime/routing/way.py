"""Rows of a chunk of tokens on their way to experts and back, hop by hop.

    there   a row goes to every unit of a tier that has one of its experts
    back    the row's result returns to where the row came from, and is summed there

In a forward, tokens go there and results come back; in a backward, gradients of results go there and gradients of
tokens come back. Rows are received and summed in the order of the peers, in fp32 at least, so no sum depends on when
messages arrive.

Each row is encoded separately in the format of its class and tier, so its rounding depends on no other row. Toward
experts it is encoded once for consecutive hops of one format, which pass the codes on; a rank's own rows are rounded
too, so that an expert sees the same row on any rank. On the way back, rows sent to other ranks are encoded anew at
each hop, and own rows are summed unrounded. Weights, their gradients and choices are never rounded.

A chunk is one or several *pieces*, consecutive tokens of a micro-batch; forward and backward may divide the pieces
into chunks differently. Rows are ordered by piece, and within a message by peer, then piece.

Shape legend: T tokens, N rows that arrive at a rank, H hidden, k experts of a token, E experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.comm.exchange import as_bytes
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.wire import MessageClass, WireFormat
from terrace.runtime.routing.route import HopRows


class Carrier(Protocol):
    """Encodes rows and exchanges them with the peers of a hop."""

    def wire(self, message: RoutedMessage) -> WireFormat:
        """The wire format of a message's rows."""

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        """Encode rows (n, H) to (n, bytes)."""

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode rows (n, bytes) to (n, H)."""

    def exchange(self, message: RoutedMessage, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows `sent` (n, bytes), in the order of the peers; `sends` and `receives` count rows per peer."""


@dataclass
class Way:
    """The route of one piece of a micro-batch through one layer, and which rows each peer was sent.

    `units` are the expert ranges (first, last + 1) of each hop's units, by peer; empty if every row goes to every peer.
    """

    tokens: int
    hops: tuple[HopRows, ...]
    units: tuple[tuple[tuple[int, int], ...], ...]
    rows: list[tuple[Tensor, ...]] = field(default_factory=list)  # by hop, the rows that each peer got

    def held(self, number: int) -> int:
        """Rows on this rank before hop `number`; after the last hop, the rows that arrived."""
        return sum(self.hops[number - 1].receives) if number else self.tokens


class Chunk:
    """Rows of some pieces, at either end or in flight. Every hop is one message, whose work runs on its lane.

    `parts` (n, ...) are hidden elements (H), followed in a forward by weights (k) and choices (k), and on the way
    back of a backward by gradients of weights.
    """

    def __init__(self, carrier: Carrier, ways: Sequence[Way], parts: Sequence[Tensor]) -> None:
        self.parts, self._carrier, self._ways = tuple(parts), carrier, ways
        self._dtypes = [part.dtype for part in parts]
        self._last: RoutedMessage | None = None  # of the codes that the elements are in
        self._passed: list[tuple[Tensor, ...]] = []

    def turn(self, parts: Sequence[Tensor]) -> None:
        """Set the results of the rows that arrived, to be sent back."""
        self.parts, self._dtypes = tuple(parts), [part.dtype for part in parts]

    def go(self, message: RoutedMessage) -> None:
        """Run the hop of a message. On CUDA, tensors that it reads are kept until `arrived`."""
        self._passed.append(self.parts)
        number = next(
            number
            for number, hop in enumerate(self._ways[0].hops)
            if (hop.tier, hop.copies) == (message.tier, message.copies)
        )
        (self._there if message.message_class is MessageClass.DISPATCH else self._back)(number, message)

    def arrived(self) -> None:
        """Release the tensors that messages have read; the compute stream has waited for them."""
        self._passed.clear()

    def pieces(self) -> list[list[Tensor]]:
        """The rows of each piece that have arrived."""
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
        """By peer, indices of its rows among all rows of the chunk before a hop."""
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
        """The rows of each piece, by peer."""
        found, start = [], 0
        for peer, sizes in enumerate(zip(*numbers, strict=True)):
            if peer == own:
                found.append(torch.split(own_rows, list(sizes)))
            else:
                found.append(torch.split(received[start : start + sum(sizes)], list(sizes)))
                start += sum(sizes)
        return found


def _wanted(experts: Tensor, hop: HopRows, units: Sequence[tuple[int, int]]) -> tuple[Tensor, ...]:
    """Indices of the rows of `experts` (n, k) to send to each peer."""
    if hop.copies:
        return (_places((experts >= 0).any(1), hop.sends[0]),) * len(hop.sends)
    wanted = [((experts >= first) & (experts < last)).any(1) for first, last in units]
    return tuple(map(_places, wanted, hop.sends))


def _places(wanted: Tensor, number: int) -> Tensor:
    """Indices of the `number` true elements of `wanted` (n)."""
    if has_streams(wanted.device):
        # The route has counted them: the host, which may be issuing messages on a lane, need not wait for the device.
        return torch.nonzero_static(wanted, size=number).squeeze(1)
    found = wanted.nonzero().squeeze(1)
    assert len(found) == number, "a route counts the rows that are sent"
    return found


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _packed(parts: Sequence[Tensor]) -> Tensor:
    """The bytes of all parts, concatenated by row."""
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
