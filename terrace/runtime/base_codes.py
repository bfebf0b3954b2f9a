"""Frozen matrices as records of codes and back (terrace.model.base_formats). All arithmetic is in fp32.

Encoding takes a whole matrix, so that records do not depend on the plan. A value is decoded as

    point[index] * ( scale_point[code of the scale] * constant + mean )

and rounded to the dtype of the result. Decoding runs in chunks, since it looks up bytes in a table.

Shape legend: O x I the matrix, or a rank's slice of it; B = I / block, the blocks of a row; R bytes of a record.
"""

from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from terrace.model.base_formats import BASE_FORMATS, GROUP, BaseFormat
from terrace.runtime import block_codes

_TINY = 1e-38  # a block of zeros has a scale of 0, and no element is divided by it; as in bitsandbytes
_CHUNK = {"cpu": 1 << 16}  # bytes of indices: on a CPU what fits in the cache
_DEVICE_CHUNK = 1 << 22


def encode(values: Tensor, code: str) -> tuple[Tensor, Tensor]:
    """Records (O, B * R), uint8, and constants (ceil(O * B / GROUP) + 1), fp32, of a whole matrix (O, I)."""
    form, (rows, row_size) = BASE_FORMATS[code], values.shape
    num_blocks = rows * row_size // form.block
    records = torch.empty(num_blocks, form.record_bytes, dtype=torch.uint8)
    scales = torch.empty(num_blocks)
    points = torch.tensor(form.points)
    middles = (points[:-1] + points[1:]) / 2
    flat = values.reshape(num_blocks, form.block)
    for blocks in _chunks(num_blocks, form, _CHUNK["cpu"]):
        part = flat[blocks].to("cpu", torch.float32)
        largest = part.abs().amax(1)
        scales[blocks] = largest
        part = (part * (1.0 / largest.clamp(min=_TINY))[:, None]).clamp_(-1, 1)
        indices = torch.bucketize(part, middles, out_int32=True).to(torch.uint8)
        per_byte = 8 // form.bits
        packed = indices[:, ::per_byte]
        for place in range(1, per_byte):
            packed = packed << form.bits | indices[:, place::per_byte]
        records[blocks, 1:] = packed
    mean = scales.double().mean().float()
    padded = torch.zeros(-(-num_blocks // GROUP) * GROUP)
    padded[:num_blocks] = scales - mean
    codes, constants = torch.empty(num_blocks, dtype=torch.int8), torch.empty(len(padded) // GROUP + 1)
    block_codes.encode(padded, 0, True, codes, constants[:-1])
    constants[-1] = mean
    records[:, 0] = codes.view(torch.uint8)
    return records.view(rows, -1), constants


def decode(
    records: Tensor, constants: Tensor, code: str, out: Tensor, first: tuple[int, int] = (0, 0), row_size: int = 0
) -> None:
    """Decode `records` (O, B * R) into `out` (O, I), contiguous.

    `constants` are those of the whole matrix, in which `first` is the slice's first (row, column) and rows have
    `row_size` elements; 0: the slice is the whole matrix.
    """
    form, (rows, own_size) = BASE_FORMATS[code], out.shape
    own, whole = own_size // form.block, (row_size or own_size) // form.block
    number = torch.arange(rows * own, device=out.device)
    # The position of each block among those of the whole matrix.
    number = (first[0] + number // own) * whole + first[1] // form.block + number % own
    records = records.reshape(rows * own, form.record_bytes)
    scales = block_codes.grid(True, out.device).points
    indices = records[:, 0].view(torch.int8).to(torch.int32)
    scales = scales[indices.abs()] * indices.sign()
    scales = scales * constants[:-1][number // GROUP] + constants[-1]
    table, flat = _table(code, out.device), out.view(rows * own, form.block)
    for blocks in _chunks(rows * own, form, _CHUNK.get(out.device.type, _DEVICE_CHUNK)):
        codes = records[blocks, 1:].to(torch.int32).view(-1)
        points = table.index_select(0, codes).view(-1, form.block)
        torch.mul(points, scales[blocks, None], out=flat[blocks])


def decoded(records: Tensor, constants: Tensor, code: str) -> Tensor:
    """The whole matrix (O, I), fp32, of `records` (O, B * R)."""
    form, (rows, row_bytes) = BASE_FORMATS[code], records.shape
    found = torch.empty(rows, row_bytes // form.record_bytes * form.block)
    decode(records, constants, code, found)
    return found


@lru_cache(maxsize=8)
def _table(code: str, device: torch.device) -> Tensor:
    """The points of the indices in each byte (256, indices in a byte)."""
    form = BASE_FORMATS[code]
    shifts = torch.arange(8 - form.bits, -1, -form.bits)
    indices = torch.arange(256)[:, None] >> shifts & ((1 << form.bits) - 1)
    return torch.tensor(form.points)[indices].to(device)


def _chunks(num_blocks: int, form: BaseFormat, num_bytes: int) -> Iterator[slice]:
    step = num_bytes // form.record_bytes
    for start in range(0, num_blocks, step):
        yield slice(start, min(num_blocks, start + step))
