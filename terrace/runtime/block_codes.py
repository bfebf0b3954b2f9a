"""8-bit codes of optimizer states, dynamic with a scale for each block (Dettmers et al., arXiv 2110.02861, section 2).

A block of 256 elements has the scale s, its largest magnitude in fp32. An element x is stored as the number of the grid
point nearest to x / s. Grid points are dense near 1 and reach down to 5.5e-7: of each decade 10^(i - 6), i = 0 .. 6,
they are the middles of equal parts of [0.1, 1], 2^i parts where states have signs, 2^(i + 1) where they have none.

    signed     0 and 127 magnitudes, of which the largest is 1: the code is a signed byte
    unsigned   0, 254 magnitudes and 1: the code is a byte

Both grids end in exactly 1 on either side, where the paper's has -0.993. So the largest magnitude is kept, and decoded
values have the same codes and scale again: a state that is decoded for a checkpoint and coded again has the same bits.

Unsigned states are second moments, which divide. A value that fp32 cannot tell from zero beside the largest of the
block is stored as zero, and a value below the smallest point is rounded up to it: a moment that vanished would turn a
small first moment into a step of any size.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from terrace.plan.state_formats import STATE_BLOCK

_DECADES = 7
# Magnitudes of at most 1 in steps of their upper 16 bits as fp32, the last of which begins at 1.
_BUCKET_BITS, _NUM_BUCKETS = 16, (0x3F800000 >> 16) + 1


class Grid(NamedTuple):
    """Points in ascending order (n), and for each bucket of magnitudes the last point that is nearest to any smaller.

    `middles` (n) are where the next point begins to be nearer; of the last point it is inf. All fp32.
    """

    points: Tensor
    middles: Tensor
    buckets: Tensor


@lru_cache(maxsize=8)
def grid(signed: bool, device: torch.device) -> Grid:
    """The grid of magnitudes, on a device."""
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
    """Code `values` (n), fp32, of which the first `lead` lie before the range, and those beyond `codes` after it.

    n is a multiple of a block. `codes` has a byte an element, int8 or uint8, `scales` an fp32 a block. `values` is
    scratch memory afterwards; elements outside of the range must be zero.
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
    """Write the elements of `codes` into `out` (n), fp32, from `lead` on; the others are zero. n is as for `encode`."""
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
