"""Plainest implementation of the codecs; every other one equals it bit for bit.

It runs on any device, never synchronizes and raises nothing: a block with inf or nan gets a NaN scale and codes of
zero, so all of it decodes to NaN.
"""

import torch
from torch import Tensor

from terrace.comm.codecs.layout import GRIDS, MIN_SCALE_BITS, NAN_SCALE_BITS, message_parts, sections
from terrace.plan.wire import SCALE_BYTES, WireFormat


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, with error feedback if there is a residual; see `terrace.comm.codecs`."""
    rows, numel = values.shape
    if residual is not None:
        values = values.to(torch.float32) + residual
    grid, parts = GRIDS[wire.codec], message_parts(wire, numel)
    scales, codes = [], []
    for part in sections(wire, numel):
        x = values[:, part.start : part.stop].to(torch.float32).reshape(rows, part.num_blocks, part.width)
        amax = x.abs().amax(dim=-1, keepdim=True)  # [rows, blocks, 1]
        # Negated, so that nan counts as well as inf.
        poisoned = ~(amax < float("inf"))
        bits = (torch.where(poisoned, 0, amax) * grid.reciprocal).view(torch.int32)
        # Round the scale up to bf16, so that no code exceeds the grid.
        bits = ((bits + 0xFFFF) & ~0xFFFF).clamp(MIN_SCALE_BITS, grid.max_scale_bits)
        bits = torch.where(poisoned, NAN_SCALE_BITS, bits)
        inverse = bits.view(torch.float32).reciprocal()
        scaled = torch.where(poisoned, 0, x * inverse)
        scales.append((bits >> 16).to(torch.int16).view(torch.uint8).flatten(1))
        codes.append(_to_codes(scaled, wire).flatten(1))
    out.zero_()
    out[:, : parts.codes] = torch.cat(scales, dim=1)
    out[:, parts.codes : parts.padding] = torch.cat(codes, dim=1)
    if residual is not None:
        residual.copy_(values - decode_fp32(out, wire, numel))


def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode every message; see `terrace.comm.codecs`."""
    out.copy_(decode_fp32(messages, wire, out.shape[1]))


def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode the messages and add them to `out` in row order; see `terrace.comm.codecs`."""
    for row in decode_fp32(messages, wire, out.shape[0]):
        out += row


def decode_fp32(messages: Tensor, wire: WireFormat, numel: int) -> Tensor:
    """Decode messages [rows, bytes] to fp32 [rows, numel]."""
    rows = messages.shape[0]
    values = torch.empty(rows, numel, dtype=torch.float32, device=messages.device)
    for part in sections(wire, numel):
        scale_bytes = messages[:, SCALE_BYTES * part.block : SCALE_BYTES * (part.block + part.num_blocks)]
        scales = scale_bytes.contiguous().view(torch.bfloat16).to(torch.float32)
        codes = messages[:, part.code : part.code_stop].reshape(rows, part.num_blocks, part.code_width)
        values[:, part.start : part.stop] = (_from_codes(codes, wire, part.width) * scales[..., None]).flatten(1)
    return values


def _to_codes(scaled: Tensor, wire: WireFormat) -> Tensor:
    # [rows, blocks, width] -> uint8 [rows, blocks, bytes of a block]
    if wire.codec == "fp8":
        return scaled.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    qmax = GRIDS[wire.codec].qmax
    codes = scaled.round().clamp(-qmax, qmax).to(torch.int8)
    if wire.codec == "int8":
        return codes.view(torch.uint8)
    half = -(-codes.shape[-1] // 2)
    packed = codes[..., :half].clone()
    packed[..., : codes.shape[-1] - half] += 16 * codes[..., half:]
    return packed.view(torch.uint8)


def _from_codes(codes: Tensor, wire: WireFormat, width: int) -> Tensor:
    # Inverse of `_to_codes`: fp32 [rows, blocks, width].
    if wire.codec == "fp8":
        return codes.view(torch.float8_e4m3fn).to(torch.float32)
    signed = codes.view(torch.int8).to(torch.int32)
    if wire.codec == "int4":
        # +8 undoes the borrow that a negative low half takes from the high half.
        high = (signed + 8) >> 4
        signed = torch.cat([signed - 16 * high, high], dim=-1)[..., :width]
    return signed.to(torch.float32)
