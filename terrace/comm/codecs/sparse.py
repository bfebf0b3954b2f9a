"""Plainest implementation of the sparse codec, for any device; `sparse_cpu.py` equals it bit for bit.

A message of n elements keeps some of every block of 4096 (`WireFormat.num_kept`), and consists of (`SparseParts`):

    scales   of the kept elements of each block, bf16, computed as in int4
    counts   one byte per section of 256 elements: how many are kept
    places   one byte per kept element, in ascending order: its index in the section
    codes    4 bits per kept element: byte j holds elements 2j (low) and 2j + 1 (high; 0 where there is none)

The elements of largest magnitude are kept, the first ones in case of ties. They are rounded as in int4, so the error
of an element x with scale s, decoded as x^, is

    kept      |x - x^| <= s / 2 + |x| 2^-22 ,  s <= max(2^-126, a / 7 (1 + 2^-7 + 2^-22)), a the largest of the block
    dropped   |x - x^| = |x| , at most the smallest kept magnitude of the block

so if k of m elements are kept, the squared error is at most (1 - k/m) sum x^2 + k (s/2 + a 2^-22)^2. Inf and nan
count as the largest magnitudes: the kept elements of their block, at least one, decode to nan.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.comm.codecs.layout import GRIDS, MIN_SCALE_BITS, NAN_SCALE_BITS
from terrace.plan.wire import SCALE_BYTES, SECTION, WireFormat

_GRID, _SHIFT = GRIDS["int4"], SECTION.bit_length() - 1
MAGNITUDE = 0x7FFFFFFF  # the bits of an fp32 without its sign: as integers they sort inf and nan behind all others


@dataclass(frozen=True)
class SparseParts:
    """End of each part of a message of `numel` elements, in bytes. Scales come first, zeros last."""

    scales: int
    counts: int
    places: int
    codes: int
    num_kept: int

    @classmethod
    def of(cls, wire: WireFormat, numel: int) -> "SparseParts":
        scales, kept = SCALE_BYTES * -(-numel // wire.block), wire.num_kept(numel)
        counts = scales - (-numel // SECTION)
        return cls(scales, counts, counts + kept, counts + kept - (-kept // 2), kept)


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, with error feedback if there is a residual; see `terrace.comm.codecs`."""
    rows, numel = values.shape
    x = values.to(torch.float32)
    if residual is not None:
        x = x + residual
    kept, scales = [], []
    full = numel // wire.block * wire.block
    for start, stop, width in ((0, full, wire.block), (full, numel, numel - full)):
        if start < stop:
            blocks = x[:, start:stop].reshape(rows, -1, width)
            found = largest(blocks, -(-width // wire.kept_of))
            first = torch.arange(start, stop, width, device=x.device)[:, None]
            kept.append((found + first).flatten(1))
            scales.append(scale_bits(blocks.gather(-1, found)))
    indexes, bits = torch.cat(kept, 1), torch.cat(scales, 1)  # [rows, kept], [rows, blocks]
    scale = bits.view(torch.float32).gather(1, indexes // wire.block)
    write(out, wire, numel, indexes, bits, to_codes(x.gather(1, indexes), scale))
    if residual is not None:
        decoded = torch.empty_like(x)
        decode(out, wire, decoded)
        residual.copy_(x - decoded)


def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode every message; see `terrace.comm.codecs`."""
    out.zero_()
    for message, row in zip(messages, out, strict=True):
        indexes, values = read(message, wire, out.shape[1])
        row.index_copy_(0, indexes, values.to(out.dtype))


def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode the messages and add them to `out` in row order; see `terrace.comm.codecs`."""
    for message in messages:
        indexes, values = read(message, wire, out.shape[0])
        out.index_add_(0, indexes, values.to(out.dtype))  # no index comes twice, so the order does not matter


def largest(blocks: Tensor, num_kept: int) -> Tensor:
    """Indices [.., num_kept] of the largest magnitudes of each block [.., width], fp32, ascending."""
    magnitudes = blocks.contiguous().view(torch.int32) & MAGNITUDE
    return magnitudes.sort(dim=-1, descending=True, stable=True).indices[..., :num_kept].sort(dim=-1).values


def scale_bits(kept: Tensor) -> Tensor:
    """fp32 bits of the scale of each block [.., blocks], from its kept elements [.., blocks, k]."""
    amax = kept.abs().amax(dim=-1)
    poisoned = ~(amax < float("inf"))  # negated, so that nan counts as well
    bits = (torch.where(poisoned, 0, amax) * _GRID.reciprocal).view(torch.int32)
    bits = ((bits + 0xFFFF) & ~0xFFFF).clamp(MIN_SCALE_BITS, _GRID.max_scale_bits)
    return torch.where(poisoned, NAN_SCALE_BITS, bits)


def to_codes(kept: Tensor, scale: Tensor) -> Tensor:
    """int8 codes of kept elements, given their scales in the same shape."""
    scaled = torch.where(scale.isnan(), 0, kept * scale.reciprocal())
    return scaled.round().clamp(-_GRID.qmax, _GRID.qmax).to(torch.int8)


def write(out: Tensor, wire: WireFormat, numel: int, indexes: Tensor, bits: Tensor, codes: Tensor) -> None:
    """Write messages `out` [rows, bytes] from indexes and codes [rows, kept] and scale bits [rows, blocks]."""
    parts = SparseParts.of(wire, numel)
    out[:, : parts.scales] = (bits >> 16).to(torch.int16).view(torch.uint8).flatten(1)
    counts = torch.zeros(len(out), parts.counts - parts.scales, dtype=torch.int32, device=out.device)
    counts.scatter_add_(1, indexes >> _SHIFT, torch.ones_like(indexes, dtype=torch.int32))
    out[:, parts.scales : parts.counts] = counts
    out[:, parts.counts : parts.places] = indexes & (SECTION - 1)
    packed = codes[:, ::2].clone()
    packed[:, : codes.shape[1] // 2] += 16 * codes[:, 1::2]
    out[:, parts.places : parts.codes] = packed.view(torch.uint8)
    out[:, parts.codes :].zero_()


def read(message: Tensor, wire: WireFormat, numel: int) -> tuple[Tensor, Tensor]:
    """Ascending indexes, int64, and values, fp32, of the elements in a message."""
    parts = SparseParts.of(wire, numel)
    counts = message[parts.scales : parts.counts].to(torch.int64)
    starts = torch.arange(0, numel, SECTION, device=message.device)
    # With the size given, nothing waits for the device.
    indexes = torch.repeat_interleave(starts, counts, output_size=parts.num_kept)
    indexes += message[parts.counts : parts.places]
    packed = message[parts.places : parts.codes].view(torch.int8).to(torch.int32)
    # +8 undoes the borrow that a negative low half takes from the high half.
    high = (packed + 8) >> 4
    codes = torch.stack([packed - 16 * high, high], dim=1).flatten()[: parts.num_kept]
    scales = message[: parts.scales].view(torch.bfloat16).to(torch.float32)
    return indexes, codes * scales.repeat_interleave(wire.block // wire.kept_of)[: parts.num_kept]
