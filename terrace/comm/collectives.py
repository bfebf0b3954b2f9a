"""Collectives by tier: gather from the outermost tier inward, reduce from the innermost outward.

With `piece(i)` the slice of a flat buffer held for a state placed on tier i (terrace.plan.layout):

    gather(outer, inner):   for tier = outer .. inner+1:   piece(tier-1) <- all-gather of piece(tier)
    reduce(inner, outer):   for tier = inner+1 .. outer:   piece(tier)   <- sum over the tier of its
                                                                          part of piece(tier-1)

Pieces are contiguous and nested, so a gather is in place and every outer link carries each element once. Sums are
computed in `plan.sums` whatever the wire format, so a reduce-scatter in a narrower format is an all-to-all and a
local sum. On gloo it always is, because gloo's reduce-scatter sends twice the bytes, as much as an all-reduce.

Block formats (terrace.comm.codecs) are sent as bytes, scales and codes of one part in one message:

    gather   encode piece(outer) once, forward the messages over all tiers of that format, decode at the end;
             the rank's own part is rounded too, so that all members hold the same values
    reduce   on each tier: encode the parts of the others, exchange, add the received parts to the exact own part
    packed   as `gather`; a reduction adds the parts of all ranks in rank order, as that of a dtype does. If a part does
             not fit, all members then send their plain values as well (terrace.comm.codecs.packed)
    whole    sparse messages of a sum that is gathered again, and any between two members: encode once, forward over
             all tiers, decode and sum all of them, the rank's own included, in one order on all ranks

A collective runs on the lane of the outermost tier it crosses, with that lane's groups and memory, so that lanes can
run concurrently. Every function here blocks (or, on CUDA, enqueues on the current stream); terrace.comm.lane makes
them asynchronous.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.arena import Arena
from terrace.comm.codecs import packed
from terrace.comm.exchange import all_gather, as_bytes
from terrace.comm.groups import TierGroup, TierGroups
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.pace import UNPACED, Pace
from terrace.comm.rounding import ErrorLog, Origin
from terrace.plan.hops import Hop, encodings, sends_copies
from terrace.plan.layout import INSIDE, Layout
from terrace.plan.plan import Plan
from terrace.plan.routes import lossy_messages
from terrace.plan.wire import BYTES, CODES, SCALE_BYTES, MessageClass
from terrace.program.message import Transfer

# Codes travel, and are added to no sum, as bytes. A packed message carries bf16.
DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES |= {CODES.codec: torch.uint8, BYTES: torch.uint8, "packed": torch.bfloat16}

NOTHING = torch.empty(0)
_CACHED_NUMEL = 1 << 16

Piece = Callable[[int], Tensor]

# torch 2.13 renamed it; 2.11 has only the older name.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """Collectives of one rank.

    Each call is passed the transfer resolved by the program (terrace.program.message): lane, ranks, hops and buffers.
    `layout` covers all ranks that together hold a block. `ledger` counts the bytes sent, `meter` the memory of
    messages, `errors` their rounding errors. `pacer` limits every collective to the rate of its tier.
    """

    def __init__(
        self,
        groups: TierGroups,
        layout: Layout,
        plan: Plan,
        ledger: Ledger,
        meter: Meter,
        device: torch.device,
        pacer: Pace = UNPACED,
    ) -> None:
        self._groups = groups
        self._layout = layout
        self.plan = plan
        self._ledger = ledger
        self._pacer = pacer
        self._sums = DTYPES[plan.sums]
        # A category of every report, as in the formula.
        meter.add("buffers", 0)
        self._arenas = {lane: Arena(device, meter) for lane in {INSIDE, *groups.lanes}}
        self.errors = ErrorLog(lossy_messages(layout, plan), device)

    def gather(self, transfer: Transfer, piece: Piece, origin: Origin) -> None:
        """Fill `piece` of the innermost tier from every rank's piece of the outermost tier, in place.

        A lossy format rounds the rank's own part too, so that all members hold the same values.
        """
        if not transfer.gathering:
            return
        self._arenas[transfer.lane].begin(transfer.gather_buffers)
        self._gather_hops(transfer, piece, origin)

    def gather_columns(self, transfer: Transfer, whole: Tensor, own: Callable[[int], slice], origin: Origin) -> None:
        """Fill `whole` (slices, columns), which may be strided, from every rank's part on the outermost tier.

        `own` maps a tier to the elements of the packed columns that are this rank's piece.
        """
        if not transfer.gathering:
            return
        arena = self._arenas[transfer.lane]
        arena.begin(transfer.gather_buffers)
        packed = arena.take(whole.shape, whole.dtype).copy_(whole).view(-1)
        self._gather_hops(transfer, lambda tier: packed[own(tier)], origin)
        whole.copy_(packed.view(whole.shape))

    def gather_bytes(self, transfer: Transfer, own: Tensor, part: Callable[[int], slice], origin: Origin) -> Tensor:
        """The bytes of all ranks, valid until the lane's next collective; `part` maps a tier to this rank's piece."""
        if not transfer.gathering:
            return own
        arena = self._arenas[transfer.lane]
        arena.begin(transfer.gather_buffers)
        whole = arena.take(transfer.gather_buffers, torch.uint8)
        whole[part(transfer.gathering[0].tier)] = own
        self._gather_hops(transfer, lambda tier: whole[part(tier)], origin)
        return whole

    def _gather_hops(self, transfer: Transfer, piece: Piece, origin: Origin) -> None:
        # Consecutive hops of one block format forward the same codes, so they are encoded and decoded once.
        for run in encodings(transfer.gathering):
            if run[0].wire.block:
                self._gather_codes(transfer, run, piece, origin)
            else:
                self._gather_values(transfer, run[0], piece)

    def reduce(self, transfer: Transfer, source: Tensor, origin: Origin) -> Tensor:
        """This rank's piece, on the outermost tier of the reduction, of the sum of every rank's `source`.

        The result is in `plan.sums` and valid until the lane's next collective; without peers it is `source` itself,
        in its own dtype. For a transfer of columns, `source` is (slices, columns) and may be strided.
        """
        if transfer.reduction:
            arena = self._arenas[transfer.lane]
            arena.begin(transfer.reduce_buffers)
            if transfer.columns is not None:
                source = arena.take(source.shape, source.dtype).copy_(source).view(-1)
        whole = [hop for hop in transfer.reduction if hop.is_whole]
        for hop in transfer.reduction[: len(transfer.reduction) - len(whole)]:
            reduce_hop = self._reduce_codes if hop.wire.block else self._reduce_values
            source = reduce_hop(transfer, hop, source, origin)
        return self._sum_messages(transfer, whole, source, origin) if whole else source

    def sum_control(
        self, transfer: Transfer, values: Tensor, largest: Tensor = NOTHING, *, alone: bool = False
    ) -> Tensor:
        """Sum `values`, fp64, then rounding errors unless `alone`, over all ranks: bitwise equal on every rank.

        Behind the sums are the maxima of `largest`. nan wins.
        """
        values = values if alone else torch.cat([values, self.errors.take()])
        num_sums, values = len(values), torch.cat([values, largest.to(values)])
        for hop in transfer.gathering:
            # All ranks sum the same rows in the same order, so results are bitwise equal, which an all-reduce does not
            # guarantee.
            rows = self._gathered(transfer, hop, values)
            values = torch.cat([rows[:, :num_sums].sum(0), rows[:, num_sums:].amax(0)])
        return values

    def gather_islands(self, transfer: Transfer, numbers: Tensor) -> Tensor:
        """Sum `numbers` (n), fp64, over each island, and gather them: (islands, n), equal on every rank."""
        for hop in transfer.reduction:
            numbers = self._gathered(transfer, hop, numbers).sum(0)
        return self.gather_numbers(transfer, numbers)

    def sum_counts(self, transfer: Transfer, counts: Tensor) -> Tensor:
        """Sum int64 `counts` (n) over all ranks of the transfer, on each. Their number divides n."""
        for hop in transfer.reduction:
            group, incoming = self._group(transfer, hop), torch.empty_like(counts)
            with self._sending(transfer, group, counts.nbytes // group.size * (group.size - 1)):
                dist.all_to_all_single(incoming, counts, group=group.handle)
            counts = incoming.view(group.size, -1).sum(0)
        for hop in transfer.gathering:
            counts = self._gathered(transfer, hop, counts).view(-1)
        return counts

    def largest(self, transfer: Transfer, numbers: Tensor) -> Tensor:
        """Elementwise maximum of `numbers` (n) over the ranks of a transfer's reduction. nan wins."""
        for hop in transfer.reduction:
            numbers = self._gathered(transfer, hop, numbers).amax(0)
        return numbers

    def gather_numbers(self, transfer: Transfer, numbers: Tensor) -> Tensor:
        """Gather `numbers` (n) from every rank of the gathering hops, unrounded: (ranks, n), equal on each."""
        rows = numbers
        for hop in transfer.gathering:
            rows = self._gathered(transfer, hop, rows.view(-1))
        return rows.view(-1, numbers.numel())

    def fused(self, transfer: Transfer, work: Callable[[str], None]) -> None:
        """Run `work`, which itself sends the transfer's single hop. It is passed the name of that hop's group."""
        (hop,) = transfer.hops
        group = self._group(transfer, hop)
        with self._sending(transfer, group, hop.sent_bytes):
            work(group.handle.group_name)

    def code_rows(self, message: MessageClass, hop: Hop, rows: Tensor, origin: Origin) -> Tensor:
        """Encode `rows` (n, elements of the hop), each separately, in the hop's format: (n, bytes)."""
        if not hop.wire.block:
            return as_bytes(rows.to(DTYPES[hop.wire.codec]))
        coded = rows.new_empty(len(rows), hop.part_bytes, dtype=torch.uint8)
        self._encode(message, hop, "rows", rows, coded, origin)
        return coded

    def plain_rows(self, hop: Hop, rows: Tensor, coded: Tensor) -> Tensor | None:
        """`rows` as bf16, to be sent after `coded` if that is packed and does not fit; None if nothing follows it."""
        follows = hop.wire.packed and packed.too_wide(coded, hop.wire, hop.numel)
        return rows.to(torch.bfloat16).contiguous() if follows else None

    def read_rows(self, hop: Hop, coded: Tensor, dtype: torch.dtype) -> Tensor:
        """Decode rows (n, bytes) from `code_rows` to (n, elements of the hop)."""
        if not hop.wire.block:
            return coded.view(DTYPES[hop.wire.codec]).to(dtype)
        rows = coded.new_empty(len(coded), hop.numel, dtype=dtype)
        codecs.decode(coded, hop.wire, rows)
        return rows

    def exchange_rows(
        self,
        transfer: Transfer,
        hop: Hop,
        sent: Tensor,
        sends: Sequence[int],
        received: Tensor,
        receives: Sequence[int],
    ) -> None:
        """Exchange rows `sent` (m, bytes) for `received` (n, bytes) on a tier, both in the order of the peers.

        `sends` and `receives` count the rows for and from each peer, 0 for this rank.
        """
        group = self._group(transfer, hop)
        with self._sending(transfer, group, sent.nbytes):
            dist.all_to_all_single(received, sent, list(receives), list(sends), group=group.handle)

    def _gathered(self, transfer: Transfer, hop: Hop, values: Tensor, *, again: bool = False) -> Tensor:
        """Gather `values` (n) from the peers on a tier, unrounded: (peers, n)."""
        group = self._group(transfer, hop)
        everyone = values.new_empty(group.size, values.numel())
        with self._sending(transfer, group, (group.size - 1) * values.nbytes, again=again):
            all_gather(everyone.view(-1), values, group, torch.empty_like(everyone))
        return everyone

    def _group(self, transfer: Transfer, hop: Hop) -> TierGroup:
        return self._groups.of(transfer.lane, transfer.ranks, hop.tier)

    def _gather_values(self, transfer: Transfer, hop: Hop, piece: Piece) -> None:
        group, dtype, arena = self._group(transfer, hop), DTYPES[hop.wire.codec], self._arenas[transfer.lane]
        whole, own = piece(hop.tier - 1), piece(hop.tier)
        if whole.dtype == dtype:
            # Equal dtypes: gather straight into the piece, which is contiguous.
            copies = arena.take([whole.numel()], dtype) if sends_copies(transfer.message_class, hop) else None
            with self._sending(transfer, group, (group.size - 1) * own.nbytes):
                all_gather(whole, own, group, copies)
        else:
            # A narrower format: the own part is rounded by the copy as well, like everyone's.
            sent = arena.take([own.numel()], dtype).copy_(own)
            received = arena.take([whole.numel()], dtype)
            with self._sending(transfer, group, (group.size - 1) * sent.nbytes):
                all_gather(received, sent, group)
            whole.copy_(received)

    def _gather_codes(self, transfer: Transfer, run: list[Hop], piece: Piece, origin: Origin) -> None:
        first = run[0]
        own, whole = piece(first.tier), piece(run[-1].tier - 1).view(-1, first.numel)
        messages = self._gathered_codes(transfer, run, own, "gather", origin)
        if first.wire.packed and packed.too_wide(messages, first.wire, first.numel):
            # All members of the run are here, as each holds all messages.
            for hop in run:
                own = self._gathered(transfer, hop, own.to(torch.bfloat16).view(-1), again=True)
            whole.copy_(own.view(-1, first.numel))
        else:
            codecs.decode(messages, first.wire, whole)

    def _gathered_codes(self, transfer: Transfer, run: list[Hop], values: Tensor, leg: str, origin: Origin) -> Tensor:
        # The messages of all members of the tiers of a run: (members, bytes), those of inner tiers outermost in order.
        first, arena = run[0], self._arenas[transfer.lane]
        sent = arena.take([1, first.part_bytes], torch.uint8)
        self._encode(transfer.message_class, first, _leg(leg, transfer), values.view(1, -1), sent, origin)
        for hop in run:
            group = self._group(transfer, hop)
            received = arena.take([hop.degree * hop.pieces, hop.wire.message_bytes(hop.numel)], torch.uint8)
            with self._sending(transfer, group, (group.size - 1) * sent.nbytes):
                all_gather(received.view(-1), sent.view(-1), group)
            sent = received
        return sent

    def _sum_messages(self, transfer: Transfer, run: list[Hop], source: Tensor, origin: Origin) -> Tensor:
        messages = self._gathered_codes(transfer, run, source, "whole", origin)
        result = self._arenas[transfer.lane].take([run[0].numel], self._sums).zero_()
        codecs.decode_add(messages, run[0].wire, result)
        return result

    def _reduce_values(self, transfer: Transfer, hop: Hop, source: Tensor, origin: Origin) -> Tensor:
        group, dtype, arena = self._group(transfer, hop), DTYPES[hop.wire.codec], self._arenas[transfer.lane]
        outgoing = source
        if source.dtype != dtype:
            outgoing = arena.take([source.numel()], dtype).copy_(source)
        # Sums are made in `plan.sums`. Gloo's reduce-scatter also sends twice the bytes.
        if self._groups.backend == "gloo" or dtype != self._sums:
            incoming = arena.take([source.numel()], dtype)
            with self._sending(transfer, group, outgoing.nbytes // group.size * (group.size - 1)):
                dist.all_to_all_single(incoming, outgoing, group=group.handle)
            result = arena.take([hop.numel], self._sums)
            _sum_rows(incoming.view(hop.degree, hop.numel), result)
        else:
            result = arena.take([hop.numel], self._sums)
            with self._sending(transfer, group, outgoing.nbytes // group.size * (group.size - 1)):
                _reduce_scatter(result, outgoing, group=group.handle)
        return result

    def _reduce_codes(self, transfer: Transfer, hop: Hop, source: Tensor, origin: Origin) -> Tensor:
        group, arena = self._group(transfer, hop), self._arenas[transfer.lane]
        rows, own = source.view(hop.degree, hop.numel), group.position
        # A rank's own part is never encoded: it enters the sum exactly.
        outgoing = arena.take([hop.degree - 1, hop.part_bytes], torch.uint8)
        incoming = arena.take([hop.degree - 1, hop.part_bytes], torch.uint8)
        # Two calls, since the rows around the own one are not contiguous; each has a residual of its own.
        self._encode(transfer.message_class, hop, _leg("before", transfer), rows[:own], outgoing[:own], origin)
        self._encode(transfer.message_class, hop, _leg("after", transfer), rows[own + 1 :], outgoing[own:], origin)
        if hop.wire.packed:
            packed.mark_all(outgoing, hop.wire, hop.numel)  # each member has a part from this rank
        splits = [hop.part_bytes] * hop.degree
        splits[own] = 0
        with self._sending(transfer, group, outgoing.nbytes):
            dist.all_to_all_single(incoming.view(-1), outgoing.view(-1), splits, splits, group=group.handle)
        if hop.wire.packed:
            return self._sum_packed(transfer, hop, rows, outgoing, incoming)
        # The own part is added exactly, then the others' in rank order.
        result = arena.take([hop.numel], self._sums).copy_(rows[own])
        codecs.decode_add(incoming, hop.wire, result)
        return result

    def _sum_packed(self, transfer: Transfer, hop: Hop, rows: Tensor, outgoing: Tensor, incoming: Tensor) -> Tensor:
        # The sum, in rank order, of what bf16 messages would have carried.
        group, result = self._group(transfer, hop), self._arenas[transfer.lane].take([hop.numel], self._sums)
        if any(packed.too_wide(each, hop.wire, hop.numel) for each in (outgoing, incoming)):
            plain = rows.to(torch.bfloat16, copy=True)
            received = torch.empty_like(plain)
            with self._sending(transfer, group, (group.size - 1) * plain[0].nbytes, again=True):
                dist.all_to_all_single(received, plain, group=group.handle)
            _sum_rows(received, result)
            return result
        packed.decode_sum(incoming, rows[group.position].to(torch.bfloat16), group.position, hop.wire, result)
        return result

    def _sending(
        self, transfer: Transfer, group: TierGroup, num_bytes: int, *, again: bool = False
    ) -> AbstractContextManager[None]:
        record = self._ledger.add_again if again else self._ledger.add
        record(transfer.message_class, group.tier, num_bytes)
        return self._pacer(group.tier, num_bytes, group.size - 1)

    def _encode(self, message: MessageClass, hop: Hop, leg: str, values: Tensor, out: Tensor, origin: Origin) -> None:
        if not values.numel():
            return
        residual = origin.residual(message, hop.tier, leg, *values.shape) if hop.wire.feedback else None
        codecs.encode(values, hop.wire, out, residual)
        if message not in self.errors.messages or hop.wire.packed:
            return
        key = (message, origin.name, hop.tier)
        # Only a sample is decoded again, since whole messages would double the cost.
        part = self.errors.sample(key, leg, hop.numel, hop.wire.block)
        if residual is not None:
            # With feedback the residual is the rounding error, so nothing is decoded.
            squares = [residual[0, part].double().square().sum(), values[0, part].double().square().sum()]
            sums = torch.stack(squares)
        else:
            sums = codecs.error_sums(values[0, part], hop.wire)
        # The scale of a block with inf or nan is nan: the sample may have missed it, the error names the message.
        scales = out[:, : SCALE_BYTES * -(-hop.numel // hop.wire.block)].view(torch.bfloat16)
        sums = sums + 0 * scales.sum(dtype=torch.float32)
        self.errors.add(key, sums)


def _leg(name: str, transfer: Transfer) -> str:
    # Each part of a message has residuals of its own.
    return name if transfer.columns is None else f"{name} from {transfer.columns[0]}"


def _sum_rows(rows: Tensor, out: Tensor) -> None:
    # Parts that stay in the CPU's cache: three times as fast as `torch.sum` over a few rows.
    step = _CACHED_NUMEL if out.device.type == "cpu" else max(1, out.numel())
    for start in range(0, out.numel(), step):
        part = out[start : start + step].copy_(rows[0, start : start + step])
        for row in rows[1:, start : start + step]:
            part.add_(row)
