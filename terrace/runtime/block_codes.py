"""8-bit codes of optimizer states: dynamic quantization with one scale per block (arXiv 2110.02861, section 2).

A block of 256 elements has a scale s, its largest magnitude in fp32. An element x is stored as the index of the grid
point nearest to x / s. Grid points are dense near 1 and reach down to 5.5e-7. In each decade 10^(i - 6), i = 0 .. 6,
they are the midpoints of equal parts of [0.1, 1]: 2^i parts for signed states, 2^(i + 1) for unsigned ones.

    signed     0 and 127 magnitudes, the largest of which is 1; int8
    unsigned   0, 254 magnitudes and 1; uint8

Both grids end in exactly +-1, where the paper's ends in -0.993. So the largest magnitude is exact, and encoding
decoded values gives the same codes and scale: a state survives a checkpoint bit by bit.

Unsigned states are second moments, which divide. A value is stored as zero only if x / s is zero in fp32; any other
value below the smallest point is rounded up to it, because a second moment of 0 would turn a small first moment into an
update of any size.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.plan.state_formats import STATE_BLOCK

_DECADES = 7
# Buckets of magnitudes up to 1 with equal upper 16 bits in fp32; the last begins at 1.
_BUCKET_BITS, _NUM_BUCKETS = 16, (0x3F800000 >> 16) + 1


class Grid(NamedTuple):
    """Points in ascending order (n), fp32, with a lookup table from magnitudes to points.

    `middles` (n), fp32, are the upper bounds of the range that rounds to each point, inf for the last. `buckets`,
    int32, hold the index of the point nearest to the lower end of each bucket of magnitudes.
    """

    points: Tensor
    middles: Tensor
    buckets: Tensor


@lru_cache(maxsize=8)
def grid(signed: bool, device: torch.device) -> Grid:
    """The grid of magnitudes on a device."""
    points = [0.0]
    for decade in range(_DECADES):
        parts = 2 ** (decade + (0 if signed else 1))
        points += [10.0 ** (decade - _DECADES + 1) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    points = [*points[:-1], 1.0] if signed else [*points, 1.0]
    exact = torch.tensor(points, dtype=torch.float64)
    middles = torch.cat([(exact[:-1] + exact[1:]) / 2, torch.tensor([torch.inf])]).to(torch.float32)
    # A bucket's magnitudes differ by less than two points do, so that at most one middle lies in it.
    starts = (torch.arange(_NUM_BUCKETS, dtype=torch.int32) << _BUCKET_BITS).view(torch.float32)
    buckets = torch.searchsorted(middles, starts, right=True).to(torch.int32)
    return Grid(exact.to(torch.float32).to(device), middles.to(device), buckets.to(device))


def encode(values: Tensor, lead: int, signed: bool, codes: Tensor, scales: Tensor) -> None:
    """Encode `values[lead : lead + codes.numel()]`, fp32; the rest of `values` must be zero.

    The length of `values` is a multiple of the block size. `codes` has a byte per element, int8 or uint8, `scales` an
    fp32 per block. Overwrites `values`.
    """
    found = grid(signed, values.device)
    blocks = values.view(len(scales), STATE_BLOCK)
    largest = torch.linalg.vector_norm(blocks, torch.inf, dim=1)
    tiny = torch.finfo(torch.float32).tiny
    # Below it quotients and products would not be exact enough to find the same point again: such a block is zero.
    scales.copy_(torch.where(largest < tiny, 0, largest))
    blocks.div_(largest.clamp_(min=tiny)[:, None])
    part = values[lead : lead + codes.numel()]
    magnitudes = part.abs() if signed else part
    # The limit is for inf and nan, which stay what they are by their scale.
    points = found.buckets[(magnitudes.view(torch.int32) >> _BUCKET_BITS).clamp_(0, _NUM_BUCKETS - 1)]
    points.add_(magnitudes >= found.middles[points])
    if signed:
        points.mul_(part.sign().to(torch.int32))
    else:
        points.add_((points == 0) & (part > 0))
    codes.copy_(points)


def decode(codes: Tensor, scales: Tensor, lead: int, signed: bool, out: Tensor) -> None:
    """Decode `codes` into `out`, fp32, from element `lead` on, and zero the rest. Its length is as in `encode`."""
    points = grid(signed, out.device).points
    out[:lead].zero_()
    out[lead + codes.numel() :].zero_()
    part = out[lead : lead + codes.numel()]
    if signed:
        numbers = codes.to(torch.int32)
        torch.mul(points[numbers.abs()], numbers.sign(), out=part)
    else:
        part.copy_(points[codes.to(torch.int32)])
    out.view(len(scales), STATE_BLOCK).mul_(scales[:, None])
