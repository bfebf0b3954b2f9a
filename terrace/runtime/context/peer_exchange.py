"""Exchanges of tensor rows between the ranks of a context group, following the `Exchange`s of a token layout.

A message holds rows of several tensors, one tensor after the other. Tensors are (1, heads, rows, D), with memory
order (1, rows, heads, D), so the heads of a row are adjacent; the caller chooses which heads go to which rank. Rows
that form one run are sent without a copy, and rows that arrive in order are used in the receive buffer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.accelerator import placed
from terrace.comm.group_p2p import GroupP2P
from terrace.model.pair_kernels import side_by_side
from terrace.plan.context import ContextGroup
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.wire import MessageClass
from terrace.runtime.context.row_coder import RowCoder
from terrace.runtime.in_block import InBlockComm, InFlight
from terrace.sequence.token_layout import Exchange, Run, merged_runs, num_rows

Give = Callable[[int], Sequence[Tensor]]  # group member -> the tensors from which rows are sent to it


class Rows:
    """The rows `runs` of a tensor (1, heads, rows, D), concatenated."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.runs = merged_runs(runs)
        self.num = num_rows(self.runs)
        self._index: Tensor | None = None
        if len(self.runs) > 1:
            self._index = placed(torch.cat([torch.arange(*run) for run in self.runs]), device)

    def of(self, x: Tensor) -> Tensor:
        """These rows of x; a view if they are one run."""
        if self._index is not None:
            return x.transpose(1, 2).index_select(1, self._index).transpose(1, 2)
        start, stop = self.runs[0] if self.runs else (0, 0)
        return x[:, :, start:stop]

    @property
    def is_run(self) -> bool:
        return self._index is None

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Copy these rows of x into `out`, in its memory order."""
        if self._index is not None:
            torch.index_select(x.transpose(1, 2), 1, self._index, out=out.transpose(1, 2))
        else:
            out.copy_(self.of(x))

    def is_all(self, num: int) -> bool:
        """Whether these are all of `num` rows, in order."""
        return self.runs == (((0, num),) if num else ())

    def set(self, x: Tensor, values: Tensor) -> None:
        if self._index is not None:
            x.index_copy_(2, self._index, values.to(x.dtype))
        else:
            self.of(x).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        if self._index is not None:
            x.index_add_(2, self._index, values.to(x.dtype))
        else:
            self.of(x).add_(values)


@dataclass(frozen=True)
class PeerExchange:
    """One rank's sends and receives in an exchange; `own` are the rows that stay on the rank, as (source, target)."""

    sends: tuple[tuple[int, Rows], ...]
    receives: tuple[tuple[int, Rows], ...]
    own: tuple[Rows, Rows] | None

    @staticmethod
    def of(exchange: Exchange, member: int, device: torch.device) -> "PeerExchange":
        """The part of group member `member` in an exchange."""
        sends, receives = (
            {peer: Rows(runs, device) for peer, runs in side if num_rows(runs)}
            for side in (exchange.sends, exchange.receives)
        )
        # Rows for the rank itself are not sent.
        out, back = sends.pop(member, None), receives.pop(member, None)
        assert (out is None) == (back is None), "rows that stay are received as well"
        own = None if out is None or back is None else (out, back)
        return PeerExchange(tuple(sends.items()), tuple(receives.items()), own)

    def reversed(self) -> "PeerExchange":
        own = None if self.own is None else (self.own[1], self.own[0])
        return PeerExchange(self.receives, self.sends, own)

    @property
    def is_silent(self) -> bool:
        return not self.sends and not self.receives

    @property
    def brings(self) -> list[Run]:
        """Runs of the rows that are received or stay, message by message."""
        here = [rows for _, rows in self.receives] + ([] if self.own is None else [self.own[1]])
        return [run for rows in here for run in rows.runs]

    @property
    def members(self) -> set[int]:
        """Members that this rank exchanges rows with."""
        return {member for member, _ in (*self.sends, *self.receives)}


class PendingRecv:
    """Rows in flight, and rows that stay."""

    def __init__(
        self,
        comm: "PeerComm",
        message: ContextMessage,
        exchange: PeerExchange,
        give: Give,
        heads: Sequence[int],
        like: Tensor,
    ) -> None:
        self._comm, self._peer_exchange = comm, exchange
        self._flight: InFlight | None = None
        self._messages: list[tuple[int, Tensor]] = []
        self._plain: dict[int, Tensor] = {}  # by member, bf16: values after packed messages that do not fit
        # Only rows that stay are kept on, and no longer than until they are taken.
        self._own = [] if exchange.own is None else [exchange.own[0].of(x) for x in give(comm.member)]
        self._heads, self._size, self._like = heads, like.shape[3], like.new_empty(0)
        if exchange.is_silent:
            return
        # Receive buffers must exist before the lane starts the exchange.
        for member, rows in exchange.receives:
            self._messages.append((member, self._empty(member, rows.num)))
        # The lane reads the given tensors, and fills the messages, until the wait.
        self._given = [(member, rows, give(member)) for member, rows in exchange.sends]
        self._flight = comm.in_block.submit(self._exchange, message)

    def _exchange(self) -> None:
        sends, plain = [], []
        for member, rows, given in self._given:
            values, coding = _side_by_side(rows, given), self._comm.coding(member)
            if coding is not None:
                (coder, tier), numels = coding, [x.shape[1] * self._size for x in given]
                coded = coder.code(tier, values, rows.num, numels)
                if coder.too_wide(tier, coded, rows.num, numels):
                    plain.append((member, values.to(torch.bfloat16)))
                values = coded
            sends.append((member, values))
        self._comm.among.exchange(MessageClass.CONTEXT, sends, self._messages)
        for (member, message), (_, rows) in zip(self._messages, self._peer_exchange.receives, strict=True):
            coding = self._comm.coding(member)
            if coding is not None and coding[0].too_wide(coding[1], message, rows.num, self._numels):
                self._plain[member] = self._like.new_empty(rows.num * sum(self._numels), dtype=torch.bfloat16)
        self._comm.among.exchange(MessageClass.CONTEXT, plain, list(self._plain.items()), again=True)

    @property
    def _numels(self) -> list[int]:
        """Elements per row of each received tensor."""
        return [heads * self._size for heads in self._heads]

    def _empty(self, member: int, num: int) -> Tensor:
        coding = self._comm.coding(member)
        if coding is None:
            return self._like.new_empty(num * sum(self._numels))
        coder, tier = coding
        return self._like.new_empty(coder.num_bytes(tier, num, self._numels), dtype=torch.uint8)

    def _values(self, member: int, message: Tensor, num: int) -> Sequence[Tensor]:
        """A received message, split by tensor."""
        coding = self._comm.coding(member)
        if member in self._plain:
            coding, message = None, self._plain[member].to(self._like.dtype)
        if coding is None:
            return torch.split(message, [num * numel for numel in self._numels])
        coder, tier = coding
        return coder.read(tier, message, num, self._numels, self._like.dtype)

    def whole(self, num: int) -> Sequence[Tensor]:
        """Wait, then assemble tensors of `num` rows from received and own rows; other rows are zero."""
        parts = list(self.parts())
        if len(parts) == 1 and parts[0][1].is_all(num):
            return parts[0][2]
        found = [side_by_side(self._like, shape=(1, heads, num, self._size)) for heads in self._heads]
        # Rows without an arrival are padding.
        for x in found if sum(rows.num for _, rows, _ in parts) < num else ():
            x.zero_()
        for _, rows, values in parts:
            for x, part in zip(found, values, strict=True):
                rows.set(x, part)
        return found

    def parts(self) -> Iterator[tuple[int, Rows, Sequence[Tensor]]]:
        """Wait, then yield (member, rows, their values in each tensor). Own rows come last."""
        if self._flight is not None:
            self._comm.wait(self._flight, self._peer_exchange)
            self._flight, self._given = None, []
        messages, self._messages = self._messages, []
        own, self._own = self._own, []
        for (member, message), (_, rows) in zip(messages, self._peer_exchange.receives, strict=True):
            shapes = [(1, rows.num, heads, self._size) for heads in self._heads]
            values = self._values(member, message, rows.num)
            yield member, rows, [x.view(shape).transpose(1, 2) for x, shape in zip(values, shapes, strict=True)]
        if self._peer_exchange.own is not None:
            yield self._comm.member, self._peer_exchange.own[1], own


def _side_by_side(rows: Rows, given: Sequence[Tensor]) -> Tensor:
    parts = [rows.of(x).transpose(1, 2) for x in given] if rows.is_run else []
    if parts and all(part.is_contiguous() for part in parts):
        begins = [part.data_ptr() for part in parts]
        ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
        first = parts[0]
        # Tensors that lie back to back in one storage are sent without a copy.
        if begins[1:] == ends[:-1] and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
            return first.as_strided((sum(part.numel() for part in parts),), (1,))
    sizes = [(1, rows.num, x.shape[1], x.shape[3]) for x in given]
    message = given[0].new_empty(sum(map(math.prod, sizes)))
    for x, size, part in zip(given, sizes, torch.split(message, [math.prod(size) for size in sizes]), strict=True):
        rows.copy(x, part.view(size).transpose(1, 2))
    return message


class PeerComm:
    """Exchanges of `member` of a context group with the other members."""

    def __init__(
        self, group: ContextGroup, member: int, among: GroupP2P, in_block: InBlockComm, coder: RowCoder | None = None
    ) -> None:
        self.group, self.member, self.among, self.in_block, self.coder = group, member, among, in_block, coder

    def coding(self, other: int) -> tuple[RowCoder, int] | None:
        """The coder and tier of messages to and from another member; None if they are sent in the compute dtype."""
        tier = self.group.tier(self.member, other)
        return None if self.coder is None or not self.coder.codes(tier) else (self.coder, tier)

    def start(
        self, message: ContextMessage, exchange: PeerExchange, give: Give, heads: Sequence[int], like: Tensor
    ) -> PendingRecv:
        """Start an exchange of rows of the tensors that `give` returns, which have `heads` heads on every member.

        The given tensors must not change until the received parts have been taken. `message` identifies the exchange.
        """
        return PendingRecv(self, message, exchange, give, heads, like)

    def ring_message(self, leg: ContextLeg, exchange: PeerExchange, *, backward: bool) -> ContextMessage:
        """The message of a ring step, on the outermost tier that its exchange crosses."""
        others = exchange.members - {self.member}
        tier = max((self.group.tier(self.member, other) for other in others), default=-1)
        return ContextMessage(leg, tier=tier, backward=backward)

    def wait(self, flight: InFlight, exchange: PeerExchange) -> None:
        """Wait for an exchange. The clock counts the time as `wait context`."""
        ranks = sorted(self.group.members[member] for member in {self.member, *exchange.members})
        self.in_block.wait(flight, tuple(ranks))
