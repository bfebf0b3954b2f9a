"""Base of the axes that route rows: exchanges over a tier, formats of rows, and the bytes that batches declare."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from terrace.comm.collectives import Collectives
from terrace.comm.rounding import Origin
from terrace.plan.hops import Hop
from terrace.plan.in_block_messages import RoutedMessage
from terrace.plan.layout import Layout
from terrace.plan.wire import MessageClass, WireFormat
from terrace.program.message import Transfer
from terrace.runtime.in_block import InBlockAxis, InBlockComm


class RoutedAxis(InBlockAxis):
    """Sends rows to other ranks and back: a `Carrier` (terrace.runtime.routing.way).

    `lines` are the ranks that rows are sent to: to one of them, and to all (`RoutedMessage.copies`). `transfers` are
    the messages among them; bytes are added to `declared`, which axes of a rank share.
    """

    def __init__(
        self,
        in_block: InBlockComm,
        rank: int,
        collectives: Collectives,
        origin: Origin,
        transfers: Sequence[Transfer],
        lines: tuple[Layout, Layout],
        declared: Counter[tuple[MessageClass, str]],
    ) -> None:
        self.in_block, self._rank, self._collectives, self._origin = in_block, rank, collectives, origin
        self._lines, self._declared = lines, declared
        self._transfers = {(each.message_class, each.ranks.axes, each.lane): each for each in transfers}

    @property
    def declared(self) -> Mapping[tuple[MessageClass, str], int]:
        return self._declared

    def peers(self, message: RoutedMessage) -> tuple[int, ...]:
        return self._line(message).peers(self._rank, message.tier)

    def wire(self, message: RoutedMessage) -> WireFormat:
        return self._over(message)[1].wire

    def code(self, message: RoutedMessage, rows: Tensor) -> Tensor:
        """Encode rows (n, H), each separately, in their message's wire format: (n, bytes)."""
        return self._collectives.code_rows(message.message_class, self._over(message)[1], rows, self._origin)

    def read(self, message: RoutedMessage, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode rows (n, bytes) to (n, H)."""
        return self._collectives.read_rows(self._over(message)[1], coded, dtype)

    def exchange(self, message: RoutedMessage, sent: Tensor, sends: Sequence[int], receives: Sequence[int]) -> Tensor:
        """Exchange rows `sent` (n, bytes) with the peers of a hop. Runs on the calling lane."""
        received = sent.new_empty(sum(receives), sent.shape[1])
        self._collectives.exchange_rows(*self._over(message), sent, sends, received, receives)
        return received

    def gather(self, transfer: Transfer, table: Tensor) -> Tensor:
        """Gather tables of counts, (ranks, numbers), from all ranks of a transfer, and wait for them."""
        found = list[Tensor]()
        line, flat = transfer.ranks, table.flatten()
        message = RoutedMessage(transfer.message_class, transfer.lane, copies=line is not self._lines[0])
        flight = self.in_block.submit(lambda: found.append(self._collectives.gather_numbers(transfer, flat)), message)
        ranks = [self._rank]
        for hop in transfer.gathering:
            ranks = [peer for rank in ranks for peer in line.peers(rank, hop.tier)]
        self.in_block.wait(flight, tuple(sorted(ranks)))
        return found[0]

    def _line(self, message: RoutedMessage) -> Layout:
        return self._lines[message.copies]

    def _over(self, message: RoutedMessage) -> tuple[Transfer, Hop]:
        transfer = self._transfers[message.message_class, self._line(message).axes, message.tier]
        (hop,) = transfer.gathering
        return transfer, hop
