"""Encodes sparse messages on a CPU, bit for bit as `sparse.py`, without sorting blocks.

Some blocks at a time. The k-th largest of the maxima of 256 strided groups of a block is a lower bound of its k-th
largest magnitude, since k groups reach it, so smaller elements are discarded. The remaining candidates, about 5 % of
a block of random numbers, get integer keys that order by magnitude and then by index, so the k-th largest key settles
ties as well. A block of equal nonzero elements has 4096 candidates and takes several times as long.

The selection uses numpy, whose partition has vector instructions and takes a fifth of the time of torch's `kthvalue`.
"""

import threading

import numpy
import torch
from torch import Tensor

from terrace.comm.codecs.sparse import MAGNITUDE, decode, decode_add, largest, scale_bits, to_codes, write
from terrace.plan.wire import SPARSE_BLOCK, WireFormat

__all__ = ["decode", "decode_add", "encode"]  # decoding is the definition's

CHUNK = 64 * SPARSE_BLOCK  # elements: measured best; fewer pay more for calls than they gain from the cache
_GROUPS = 256  # at least the number of kept elements per block
_SHIFT = SPARSE_BLOCK.bit_length() - 1

_local = threading.local()


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, with error feedback if there is a residual; see `terrace.comm.codecs`."""
    numel = values.shape[1]
    full = numel // SPARSE_BLOCK * SPARSE_BLOCK
    starts = [*range(0, full, CHUNK), *([full] if full < numel else [])]  # the last block may be short
    for row, message in enumerate(out):
        indexes, bits, codes = [], [], []
        for start, stop in zip(starts, [*starts[1:], numel], strict=True):
            left = None if residual is None else residual[row, start:stop]
            x = _inputs(values[row, start:stop], left)
            found = _largest(x, wire.block // wire.kept_of) if start < full else largest(x, -(-len(x) // wire.kept_of))
            blocks = x.index_select(0, found).view(-1 if start < full else 1, wire.num_kept(min(len(x), SPARSE_BLOCK)))
            scales = scale_bits(blocks)
            scale = scales.view(torch.float32)[:, None]
            code = to_codes(blocks, scale)
            if left is not None:
                left.index_add_(0, found, (code * scale).view(-1), alpha=-1)
            indexes.append(found + start)
            bits.append(scales)
            codes.append(code.view(-1))
        write(message[None], wire, numel, torch.cat(indexes)[None], torch.cat(bits)[None], torch.cat(codes)[None])


def _inputs(values: Tensor, residual: Tensor | None) -> Tensor:
    # The values to encode, fp32. With feedback they are in the residual's memory, and decoded values are subtracted.
    if values.dtype != torch.float32:
        values = _scratch()[0][: len(values)].copy_(values)
    return values if residual is None else residual.add_(values)


def _scratch() -> tuple[Tensor, Tensor, Tensor]:
    if not hasattr(_local, "buffers"):
        # Per thread, since each lane encodes on its own. A tensor born in inference mode could not be written outside.
        with torch.inference_mode(False):
            dtypes = (torch.float32, torch.int32, torch.bool)
            _local.buffers = tuple(torch.empty(CHUNK, dtype=dtype) for dtype in dtypes)
    buffers: tuple[Tensor, Tensor, Tensor] = _local.buffers
    return buffers


def _largest(x: Tensor, num_kept: int) -> Tensor:
    # Indexes [blocks num_kept] into x [blocks 4096] of the largest of every block, ascending.
    _, magnitudes, flags = (buffer[: len(x)] for buffer in _scratch())
    torch.bitwise_and(x.view(torch.int32), MAGNITUDE, out=magnitudes)
    maxima = magnitudes.view(-1, SPARSE_BLOCK // _GROUPS, _GROUPS).amax(dim=1)
    bound, of_blocks = _smallest(maxima, num_kept), flags.view(-1, SPARSE_BLOCK)
    torch.ge(magnitudes.view(-1, SPARSE_BLOCK), bound.clamp(min=1), out=of_blocks)
    # In a block of mostly zeros, as in gradients of embeddings, not all zeros need be candidates: the kept ones are
    # among its first elements.
    of_blocks[:, :num_kept].logical_or_(bound == 0)
    candidates = torch.from_numpy(numpy.flatnonzero(flags.numpy()))
    block = candidates >> _SHIFT
    # Of equal magnitudes the one that comes first has the larger key, so no two keys are equal.
    keys = magnitudes.index_select(0, candidates).to(torch.int64)
    keys = keys.bitwise_left_shift_(_SHIFT).sub_(candidates & (SPARSE_BLOCK - 1))
    number = torch.bincount(block, minlength=len(maxima))
    widest = int(number.max())
    rows = torch.full((len(maxima), widest), -SPARSE_BLOCK, dtype=torch.int64)  # below every key
    first = torch.arange(len(maxima)) * widest - (
        number.cumsum(0) - number
    )  # of a block in `rows`, less its candidates
    rows.view(-1).scatter_(0, torch.arange(len(candidates)) + first.index_select(0, block), keys)
    least = _smallest(rows, num_kept).view(-1).index_select(0, block)
    return candidates.masked_select(keys >= least)


def _smallest(rows: Tensor, number: int) -> Tensor:
    # The smallest of the `number` largest of each row [rows, n]: [rows, 1].
    place = rows.shape[1] - number
    return torch.from_numpy(numpy.partition(rows.numpy(), place, axis=1)[:, place : place + 1])
