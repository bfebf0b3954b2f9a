"""Rows of tensors that go from rank to rank: an `Exchange` of a spread, carried out.

A message holds, of each of several tensors, some rows, one tensor after the other. Tensors are (1, heads, rows, D), and
lie in memory as (1, rows, heads, D), heads of a row side by side; which heads go to whom is up to the caller. Rows that
are one run are sent from where they are, and what arrives in order is used where it arrived.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.comm import GroupP2P, Ticket
from terrace.model.pair_kernels import side_by_side
from terrace.plan import MessageClass
from terrace.plan.context import ContextGroup
from terrace.runtime.means import Means
from terrace.sequence.token_layout import Exchange, Run, merged_runs, num_rows

Give = Callable[[int], Sequence[Tensor]]  # member of the pool -> the tensors that it is given rows of


class Rows:
    """Some rows of a tensor (1, heads, rows, D): those of `runs`, one after the other."""

    def __init__(self, runs: Sequence[Run], device: torch.device) -> None:
        self.runs = merged_runs(runs)
        self.num = num_rows(self.runs)
        self._index: Tensor | None = None
        if len(self.runs) > 1:
            self._index = torch.cat([torch.arange(*run) for run in self.runs]).to(device)

    def of(self, x: Tensor) -> Tensor:
        """Return these rows of x; a view where they are one run."""
        if self._index is not None:
            return x.transpose(1, 2).index_select(1, self._index).transpose(1, 2)
        start, stop = self.runs[0] if self.runs else (0, 0)
        return x[:, :, start:stop]

    @property
    def is_run(self) -> bool:
        """Whether they are one run, and so a view."""
        return self._index is None

    def copy(self, x: Tensor, out: Tensor) -> None:
        """Have `out` become these rows of x; its heads lie side by side."""
        if self._index is not None:
            torch.index_select(x.transpose(1, 2), 1, self._index, out=out.transpose(1, 2))
        else:
            out.copy_(self.of(x))

    def is_all(self, num: int) -> bool:
        """Whether these are all of `num` rows, in their order."""
        return self.runs == (((0, num),) if num else ())

    def set(self, x: Tensor, values: Tensor) -> None:
        """Make these rows of x equal to `values`."""
        if self._index is not None:
            x.index_copy_(2, self._index, values.to(x.dtype))
        else:
            self.of(x).copy_(values)

    def add(self, x: Tensor, values: Tensor) -> None:
        """Add `values` to these rows of x."""
        if self._index is not None:
            x.index_add_(2, self._index, values.to(x.dtype))
        else:
            self.of(x).add_(values)


@dataclass(frozen=True)
class PeerExchange:
    """An exchange with its rows made ready; `own` is what stays: (rows from, rows to)."""

    sends: tuple[tuple[int, Rows], ...]
    receives: tuple[tuple[int, Rows], ...]
    own: tuple[Rows, Rows] | None

    @staticmethod
    def of(exchange: Exchange, member: int, device: torch.device) -> "PeerExchange":
        """Return the exchange of the rank that is `member` of the pool."""
        sends, receives = (
            {peer: Rows(runs, device) for peer, runs in side if num_rows(runs)}
            for side in (exchange.sends, exchange.receives)
        )
        out, back = sends.pop(member, None), receives.pop(member, None)
        assert (out is None) == (back is None), "what stays has where it goes"
        own = None if out is None or back is None else (out, back)
        return PeerExchange(tuple(sends.items()), tuple(receives.items()), own)

    def reversed(self) -> "PeerExchange":
        """Return the exchange the other way round."""
        own = None if self.own is None else (self.own[1], self.own[0])
        return PeerExchange(self.receives, self.sends, own)

    @property
    def is_silent(self) -> bool:
        """Whether nothing goes to or comes from another rank."""
        return not self.sends and not self.receives

    @property
    def brings(self) -> list[Run]:
        """The rows that come or stay, message by message."""
        here = [rows for _, rows in self.receives] + ([] if self.own is None else [self.own[1]])
        return [run for rows in here for run in rows.runs]

    @property
    def members(self) -> set[int]:
        """The members that this rank exchanges something with."""
        return {member for member, _ in (*self.sends, *self.receives)}


class PendingRecv:
    """Rows under way, and those that stay."""

    def __init__(
        self, comm: "PeerComm", exchange: PeerExchange, give: Give, heads: Sequence[int], like: Tensor
    ) -> None:
        self._comm, self._peer_exchange = comm, exchange
        self._ticket: Ticket | None = None
        self._messages: list[tuple[int, Tensor]] = []
        # Of what is given, only what stays is kept on, and no longer than until it was asked for.
        self._own = [] if exchange.own is None else [exchange.own[0].of(x) for x in give(comm.member)]
        self._heads, self._size, self._like = heads, like.shape[3], like.new_empty(0)
        if exchange.is_silent:
            return
        for member, rows in exchange.receives:
            self._messages.append((member, like.new_empty(rows.num * sum(heads) * self._size)))
        # The lane reads what is given, and fills the messages, until the ticket was waited for.
        self._given = [(member, rows, give(member)) for member, rows in exchange.sends]
        self._ticket = comm.means.lane.submit(self._exchange)

    def _exchange(self) -> None:
        sends = [(member, _packed(rows, given)) for member, rows, given in self._given]
        self._comm.among.exchange(MessageClass.CONTEXT, sends, self._messages)

    def whole(self, num: int) -> Sequence[Tensor]:
        """Wait, then return tensors of `num` rows, made of those that arrived and stayed; the rest of them is zero."""
        parts = list(self.parts())
        if len(parts) == 1 and parts[0][1].is_all(num):
            return parts[0][2]
        found = [side_by_side(self._like, shape=(1, heads, num, self._size)) for heads in self._heads]
        for x in found if sum(rows.num for _, rows, _ in parts) < num else ():
            x.zero_()
        for _, rows, values in parts:
            for x, part in zip(found, values, strict=True):
                rows.set(x, part)
        return found

    def parts(self) -> Iterator[tuple[int, Rows, Sequence[Tensor]]]:
        """Wait, then yield (member, rows, what it gave for them of each tensor), what stays last."""
        if self._ticket is not None:
            self._comm.wait(self._ticket, self._peer_exchange)
            self._ticket, self._given = None, []
        messages, self._messages = self._messages, []
        own, self._own = self._own, []
        for (member, message), (_, rows) in zip(messages, self._peer_exchange.receives, strict=True):
            shapes = [(1, rows.num, heads, self._size) for heads in self._heads]
            values = torch.split(message, [math.prod(shape) for shape in shapes])
            yield member, rows, [x.view(shape).transpose(1, 2) for x, shape in zip(values, shapes, strict=True)]
        if self._peer_exchange.own is not None:
            yield self._comm.member, self._peer_exchange.own[1], own


def _packed(rows: Rows, given: Sequence[Tensor]) -> Tensor:
    """Return these rows of tensors as a message: where they are, if they lie one after the other."""
    parts = [rows.of(x).transpose(1, 2) for x in given] if rows.is_run else []
    if parts and all(part.is_contiguous() for part in parts):
        begins = [part.data_ptr() for part in parts]
        ends = [begin + part.nbytes for begin, part in zip(begins, parts, strict=True)]
        first = parts[0]
        if begins[1:] == ends[:-1] and len({part.untyped_storage().data_ptr() for part in parts}) == 1:
            return first.as_strided((sum(part.numel() for part in parts),), (1,))
    sizes = [(1, rows.num, x.shape[1], x.shape[3]) for x in given]
    message = given[0].new_empty(sum(map(math.prod, sizes)))
    for x, size, part in zip(given, sizes, torch.split(message, [math.prod(size) for size in sizes]), strict=True):
        rows.copy(x, part.view(size).transpose(1, 2))
    return message


class PeerComm:
    """What carries rows between the ranks of a pool, this one being `member` of it."""

    def __init__(self, group: ContextGroup, member: int, among: GroupP2P, means: Means) -> None:
        self.group, self.member, self.among, self.means = group, member, among, means

    def start(self, exchange: PeerExchange, give: Give, heads: Sequence[int], like: Tensor) -> PendingRecv:
        """Begin an exchange of rows of the tensors that `give` returns, which have so many `heads` on every member.

        What is given must stay as it is until the parts that arrive were asked for.
        """
        return PendingRecv(self, exchange, give, heads, like)

    def wait(self, ticket: Ticket, exchange: PeerExchange) -> None:
        """Wait for an exchange; its time is the clock's `wait context`."""
        ranks = sorted(self.group.members[member] for member in {self.member, *exchange.members})
        with self.means.message(MessageClass.CONTEXT, tuple(ranks)):
            ticket.wait()
