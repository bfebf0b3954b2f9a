"""The codecs on a CPU: eager torch over chunks that stay in the second-level cache.

Eager torch runs one loop per operation, so the cost is the number of passes and, for small chunks, the number of
operations. An int8 encode of bf16 takes six passes: clear signs, maximum, widen, scale, round, narrow.

    maximum    of the bits without their sign, as integers: several times faster than any maximum of
               absolute values in torch; it orders inf and nan above everything
    views      made once per call and split into chunks by `Tensor.split`: a view made by slicing costs as much as
               a pass over a tenth of a chunk
    scratch    allocated once per thread and written with `out=`: two buffers of `CHUNK` fp32
    int4       a byte is low + 16 high, so packing is one addition and unpacking two, of whole bytes
    e4m3       decodes through fp16, which the processor converts to fp32 and which holds e4m3
               times 2^-8 exactly, subnormals included

The product of a code and a scale is exact in fp32 (at most 7 bits times 8), so it does not matter whether torch
contracts `addcmul` to a fused multiply-add. The product of an element and 1 / scale is not exact: nothing is fused
there.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from terrace.comm.codecs.layout import GRIDS, MIN_SCALE_BITS, Section, message_parts, sections
from terrace.plan.wire import WireFormat

CHUNK = 1 << 17  # elements; two fp32 buffers, the input and the codes are 1.4 MB: measured best with 2 MB of cache
_INTEGER = {torch.bfloat16: (torch.int16, 0x7FFF), torch.float32: (torch.int32, 0x7FFFFFFF)}
_SATURATING = 2.0**125  # from this magnitude on a scale may have been capped, and a code may lie outside the grid

_local = threading.local()


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, with error feedback if there is a residual; see `terrace.comm.codecs`."""
    for part in sections(wire, values.shape[1]):
        kept = _split(_elements(residual, part), part) if residual is not None else None
        views = (_elements(values, part), _scales(out, part), _codes(out, part))
        for x, scale_out, codes in zip(*(_split(view, part) for view in views), strict=True):
            scratch = _scratch(x.shape)
            rest = next(kept) if kept is not None else None
            scaled = scratch.first
            if rest is not None:
                x, scaled = scratch.first.copy_(x).add_(rest), scratch.second
            elif x.dtype == torch.float64:
                x = scratch.first.copy_(x)
            scale, largest = _block_scales(x, scratch, wire)
            # One pass for fp32; other dtypes are widened by the copy first.
            if x.dtype == torch.float32:
                torch.mul(x, scale.reciprocal(), out=scaled)
            else:
                scaled.copy_(x).mul_(scale.reciprocal())
            if largest == float("inf"):
                scaled.masked_fill_(scale.isnan(), 0)
            _round(scaled, wire, codes, largest)
            scale_out.copy_(scale)
            if largest == float("inf"):  # a vectorised copy to bf16 makes a nan of other bits
                scale_out.masked_fill_(scale.isnan(), float("nan"))
            if rest is not None:
                # From the codes just written, while they are in the cache: the residual is v - decoded(v).
                points, factor = _points(codes, scale, wire, scaled)
                torch.addcmul(x, points, factor, value=-1, out=rest)
    parts = message_parts(wire, values.shape[1])
    if parts.padding < parts.total:
        out[:, parts.padding :].zero_()


def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode every message; see `terrace.comm.codecs`."""
    for part in sections(wire, out.shape[1]):
        views = (_elements(out, part), _scales(messages, part), _codes(messages, part))
        for target, scale, codes in zip(*(_split(view, part) for view in views), strict=True):
            scratch = _scratch(target.shape)
            points, factor = _points(codes, scale.to(torch.float32), wire, scratch.first)
            if out.dtype == torch.float32:
                torch.mul(points, factor, out=target)
            else:
                # In fp32 first, so that the output's dtype rounds only once.
                target.copy_(points.mul_(factor))


def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode the messages and add them to `out` in row order; see `terrace.comm.codecs`."""
    for part in sections(wire, out.shape[0]):
        views = (_elements(out[None], part), _scales(messages, part), _codes(messages, part))
        for target, scales, codes in zip(*(torch.split(view, CHUNK // part.width, 1) for view in views), strict=True):
            scratch = _scratch(target.shape)
            for scale, code in zip(
                torch.split(scales.float(), 1), torch.split(codes, 1), strict=True
            ):  # sums stay in the cache
                points, factor = _points(code, scale, wire, scratch.first)
                if out.dtype == torch.float32:
                    target.addcmul_(points, factor)
                else:
                    target.add_(points.mul_(factor))


@dataclass(frozen=True)
class _Scratch:
    shape: torch.Size  # rows, blocks, width
    first: Tensor
    second: Tensor
    integers: dict[torch.dtype, Tensor]


def _scratch(shape: torch.Size) -> _Scratch:
    scratch: _Scratch | None = getattr(_local, "scratch", None)
    if scratch is None or scratch.shape != shape:
        # Per thread, since each lane encodes on its own.
        if not hasattr(_local, "buffers"):
            # A tensor born in inference mode could not be written outside it.
            with torch.inference_mode(False):
                _local.buffers = [torch.empty(CHUNK, dtype=torch.float32) for _ in range(2)]
        first, second = _local.buffers
        numel = shape.numel()
        integers = {bits: second.view(bits)[:numel].view(shape) for bits in (torch.int16, torch.int32)}
        scratch = _Scratch(shape, first[:numel].view(shape), second[:numel].view(shape), integers)
        _local.scratch = scratch
    return scratch


def _split(view: Tensor, part: Section) -> Iterator[Tensor]:
    # Chunks are some whole rows, or some blocks of one row.
    rows = max(1, CHUNK // (part.num_blocks * part.width))
    for band in torch.split(view, rows, 0):
        yield from torch.split(band, CHUNK // part.width, 1)


def _elements(tensor: Tensor, part: Section) -> Tensor:
    # [rows, n] -> [rows, blocks, width]
    return tensor[:, part.start : part.stop].view(-1, part.num_blocks, part.width)


def _scales(messages: Tensor, part: Section) -> Tensor:
    # -> [rows, blocks, 1], bf16
    return messages.view(torch.bfloat16)[:, part.block : part.block + part.num_blocks].unsqueeze(2)


def _codes(messages: Tensor, part: Section) -> Tensor:
    # -> [rows, blocks, bytes of a block], int8
    return messages[:, part.code : part.code_stop].view(torch.int8).view(-1, part.num_blocks, part.code_width)


def _block_scales(x: Tensor, scratch: _Scratch, wire: WireFormat) -> tuple[Tensor, float]:
    # -> scales [rows, blocks, 1], fp32, and the largest magnitude of the chunk: inf if it holds inf or nan, and their
    # blocks then have a NaN scale. Overwrites `scratch.second`.
    integer, mask = _INTEGER[x.dtype]
    # The integer view orders inf and nan above every finite magnitude, so one maximum finds them too.
    magnitudes = torch.bitwise_and(x.view(integer), mask, out=scratch.integers[integer])
    amax = magnitudes.amax(dim=-1, keepdim=True).view(x.dtype).to(torch.float32)
    largest = float(amax.max())
    poisoned = None
    # Negated, so that nan fails the comparison, too.
    if not largest < float("inf"):
        largest, poisoned = float("inf"), ~(amax < float("inf"))
        amax.masked_fill_(poisoned, 0)
    grid = GRIDS[wire.codec]
    bits = amax.mul_(grid.reciprocal).view(torch.int32)
    # Round the scale up to bf16, so that no code exceeds the grid.
    bits.add_(0xFFFF).bitwise_and_(~0xFFFF).clamp_(MIN_SCALE_BITS, grid.max_scale_bits)
    scale = bits.view(torch.float32)
    if poisoned is not None:
        scale.masked_fill_(poisoned, float("nan"))
    return scale, largest


def _round(scaled: Tensor, wire: WireFormat, codes: Tensor, largest: float) -> None:
    # In place, [rows, blocks, width].
    if wire.codec == "fp8":
        # A capped scale leaves at most 453, which rounds to 448.
        codes.view(torch.float8_e4m3fn).copy_(scaled)
        return
    scaled.round_()
    if largest >= _SATURATING:  # else the scale was rounded up, and no code can lie outside the grid
        qmax = GRIDS[wire.codec].qmax
        scaled.clamp_(-qmax, qmax)
    if wire.codec == "int4":
        half = codes.shape[-1]
        high = scaled[..., half:]
        scaled = scaled[..., :half]
        scaled[..., : high.shape[-1]].add_(high, alpha=16)
    codes.copy_(scaled)


def _points(codes: Tensor, scale: Tensor, wire: WireFormat, points: Tensor) -> tuple[Tensor, Tensor]:
    # Grid points in `points` [rows, blocks, width]; times the returned factor they are the elements.
    if wire.codec == "int8":
        return points.copy_(codes), scale
    if wire.codec == "int4":
        half = codes.shape[-1]
        high = torch.add(codes, 8).bitwise_right_shift_(4)
        points[..., half:].copy_(high[..., : points.shape[-1] - half])
        points[..., :half].copy_(high.mul_(-16).add_(codes))
        return points, scale
    # [s eeee mmm], sign-extended to 16 bits and moved by 7, is s s eeee mmm 0000000: without the second s, fp16.
    words = codes.to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return points.copy_(words.view(torch.float16)), scale * 256
