"""Collectives by tier: gather from the outermost tier inward, reduce from the innermost outward.

With `piece(i)` the part of a flat buffer that a state placed on tier i keeps (terrace.plan.layout):

    gather(outer, inner):   for tier = outer .. inner+1:   piece(tier-1) <- all-gather of piece(tier)
    reduce(inner, outer):   for tier = inner+1 .. outer:   piece(tier)   <- sum over the tier of its
                                                                          part of piece(tier-1)

Pieces are contiguous and nested, so a gather is in place and every outer link carries each element
once. Sums are made in the master dtype whatever the wire format, so a reduce-scatter of a narrower format
is an all-to-all and a local sum. On gloo it always is: gloo's own sends as much as an all-reduce, twice
the bytes.

Every function here blocks (or, on CUDA, enqueues on the current stream); terrace.comm.lane makes them
asynchronous.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from terrace.comm.groups import TierGroup, TierGroups
from terrace.comm.ledger import Ledger, Meter
from terrace.plan import MessageClass, Plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}

Piece = Callable[[int], Tensor]

# torch 2.13 renamed these; 2.11 has only the older names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The collectives of one rank.

    `ledger` counts what is handed to torch, `meter` temporary buffers.
    """

    def __init__(self, groups: TierGroups, plan: Plan, ledger: Ledger, meter: Meter) -> None:
        self._groups = groups
        self._plan = plan
        self._ledger = ledger
        self._meter = meter
        self._master = DTYPES[plan.master]

    def gather(self, message: MessageClass, piece: Piece, outer: int, inner: int) -> None:
        """Fill `piece(inner)` from the `piece(outer)` of every rank, in place.

        A rounding format rounds the rank's own part too, so that all members hold the same values.
        """
        for tier in range(outer, inner, -1):
            group = self._groups[tier]
            if group.handle is not None:
                self._all_gather(message, group, piece(tier - 1), piece(tier))

    def reduce(self, message: MessageClass, source: Tensor, inner: int, outer: int) -> Tensor:
        """Return this rank's `piece(outer)` of the sum of every rank's `source`, a `piece(inner)`.

        The result is in the master dtype; where no tier between has peers it is `source` itself, in its own.
        """
        held_bytes = 0
        for tier in range(inner + 1, outer + 1):
            group = self._groups[tier]
            if group.handle is not None:
                source = self._reduce_scatter(message, group, source)
                self._meter.add("buffers", -held_bytes)
                held_bytes = source.nbytes
        self._meter.add("buffers", -held_bytes)
        return source

    def sum_control(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks of three fp64 numbers, the same bits on every rank."""
        for tier in range(len(self._groups.coordinates)):
            group = self._groups[tier]
            if group.handle is not None:
                everyone = values.new_empty(group.size * values.numel())
                all_gather(everyone, values, group=group.handle)
                self._ledger.add(MessageClass.CONTROL, group.tier, (group.size - 1) * values.nbytes)
                values = everyone.view(group.size, -1).sum(0)
        return values

    def _all_gather(self, message: MessageClass, group: TierGroup, whole: Tensor, own: Tensor) -> None:
        dtype = DTYPES[self._plan.wire_format(message, group.tier).name]
        sent = own
        if whole.dtype == dtype:
            all_gather(whole, own, group=group.handle)
        else:
            sent, received = own.to(dtype), whole.new_empty(whole.numel(), dtype=dtype)
            self._meter.add("buffers", sent.nbytes + received.nbytes)
            all_gather(received, sent, group=group.handle)
            whole.copy_(received)
            self._meter.add("buffers", -sent.nbytes - received.nbytes)
        self._ledger.add(message, group.tier, (group.size - 1) * sent.nbytes)

    def _reduce_scatter(self, message: MessageClass, group: TierGroup, source: Tensor) -> Tensor:
        """Return this rank's part of the sum, which stays counted in the meter."""
        outgoing = source.to(DTYPES[self._plan.wire_format(message, group.tier).name])
        length = source.numel() // group.size
        temporary = outgoing.nbytes if outgoing is not source else 0
        if self._groups.backend == "gloo" or outgoing.dtype != self._master:
            incoming = torch.empty_like(outgoing)
            self._meter.add("buffers", temporary + incoming.nbytes)
            dist.all_to_all_single(incoming, outgoing, group=group.handle)
            result = incoming.view(group.size, length).sum(0, dtype=self._master)
            self._meter.add("buffers", result.nbytes)
            self._meter.add("buffers", -temporary - incoming.nbytes)
        else:
            result = outgoing.new_empty(length)
            self._meter.add("buffers", temporary + result.nbytes)
            _reduce_scatter(result, outgoing, group=group.handle)
            self._meter.add("buffers", -temporary)
        self._ledger.add(message, group.tier, outgoing.nbytes // group.size * (group.size - 1))
        return result
