"""Encodes rows of messages between context ranks in the wire formats of their tiers.

Each row of a tensor (one token, its heads in it) is encoded separately, so its rounding depends neither on other rows
nor on which rows are in the message.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from terrace.comm.codecs import packed
from terrace.comm.collectives import Collectives
from terrace.comm.ledger import Meter
from terrace.comm.rounding import Origin
from terrace.plan.hops import Hop
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass


class RowCoder:
    """Encodes and decodes messages of one rank: `num` rows of tensors with `numels` elements per row."""

    def __init__(self, collectives: Collectives, plan: Plan, tiers: Sequence[str], meter: Meter) -> None:
        self._collectives = collectives
        self._wires = [plan.wire_format(MessageClass.CONTEXT, tier) for tier in tiers]
        self._compute = FORMATS[plan.compute]
        self._origin = Origin("attention", torch.device("cpu"), meter)

    def codes(self, tier: int) -> bool:
        """Whether messages over a tier use a wire format other than the compute dtype."""
        return self._wires[tier] != self._compute

    def num_bytes(self, tier: int, num: int, numels: Sequence[int]) -> int:
        """Bytes of an encoded message over a tier."""
        return num * sum(self._hop(tier, numel).part_bytes for numel in numels)

    def code(self, tier: int, values: Tensor, num: int, numels: Sequence[int]) -> Tensor:
        """Encode `values`, the rows of one tensor after those of another, to bytes."""
        parts = torch.split(values, [num * numel for numel in numels])
        coded = [
            self._collectives.code_rows(
                MessageClass.CONTEXT, self._hop(tier, numel), part.view(num, numel), self._origin
            ).view(-1)
            for part, numel in zip(parts, numels, strict=True)
        ]
        return torch.cat(coded)

    def too_wide(self, tier: int, message: Tensor, num: int, numels: Sequence[int]) -> bool:
        """Whether a packed row does not fit, so that the plain values of the whole message follow."""
        hops = [self._hop(tier, numel) for numel in numels]
        if not self._wires[tier].packed:
            return False
        parts = torch.split(message, [num * hop.part_bytes for hop in hops])
        return any(
            packed.too_wide(part.view(num, hop.part_bytes), hop.wire, hop.numel)
            for hop, part in zip(hops, parts, strict=True)
        )

    def read(self, tier: int, message: Tensor, num: int, numels: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Decode the rows (num, numel) of each tensor."""
        hops = [self._hop(tier, numel) for numel in numels]
        parts = torch.split(message, [num * hop.part_bytes for hop in hops])
        return [
            self._collectives.read_rows(hop, part.view(num, hop.part_bytes), dtype)
            for hop, part in zip(hops, parts, strict=True)
        ]

    def _hop(self, tier: int, numel: int) -> Hop:
        return Hop(tier, 2, self._wires[tier], numel)
