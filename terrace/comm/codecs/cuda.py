"""The codecs on CUDA: launches of the Triton kernels in `kernels.py`. Import it only if Triton is installed.

A program works on a few whole blocks of one row, `TILE` elements, so every block's largest magnitude stays in it and
memory is touched once: an encode reads an element and writes its code. Programs with full blocks only run without
masks, so that loads and stores can be vectorised; a second launch takes the rest of every row, a short last block
included.

The kernels equal `reference.py` bit for bit because of

    maximum      of the bits without their sign, as integers: inf and nan lie above every finite magnitude
    1 / scale    `tl.div_rn`, the correctly rounded quotient
    rounding     half even by adding 1.5 * 2^23 and reading the bits; e4m3 by integer arithmetic, as older
                 devices have no conversion
    no fusing    `enable_fp_fusion=False`: a fused x * inverse + 1.5 * 2^23 would round once instead of twice

A block that holds inf or nan gets a NaN scale and codes of zero; nothing here waits for the device.
"""

import torch
from torch import Tensor

from terrace.comm.codecs.kernels import decode_kernel, encode_kernel
from terrace.comm.codecs.layout import GRIDS, INF_BITS, MIN_SCALE_BITS, NAN_SCALE_BITS, message_parts
from terrace.plan.wire import WireFormat

TILE = 4096  # elements per program, 32 per thread with Triton's 4 warps: a guess, see `bench/gpu.py`
_KINDS = {"int8": 0, "fp8": 1, "int4": 2}


def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row, with error feedback if there is a residual; see `terrace.comm.codecs`."""
    rows, numel = values.shape
    grid, parts = GRIDS[wire.codec], message_parts(wire, numel)
    for full, first, programs in _launches(numel, wire.block):
        encode_kernel[(programs, rows)](
            values,
            # A kernel needs some pointer; without feedback it is never read.
            values if residual is None else residual,
            out.view(torch.int8),
            out.view(torch.int16),
            numel,
            values.stride(0),
            0 if residual is None else residual.stride(0),
            out.stride(0),
            parts.codes,
            first,
            grid.reciprocal,
            FULL=full,
            FEEDBACK=residual is not None,
            KIND=_KINDS[wire.codec],
            QMAX=int(grid.qmax),
            MIN_SCALE=MIN_SCALE_BITS,
            MAX_SCALE=grid.max_scale_bits,
            INF=INF_BITS,
            NAN_SCALE=NAN_SCALE_BITS,
            BLOCKS=_blocks(wire.block),
            BLOCK=wire.block,
            enable_fp_fusion=False,
        )
    if parts.padding < parts.total:
        out[:, parts.padding :].zero_()


def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode every message; see `terrace.comm.codecs`."""
    _decode(messages, wire, out, summed=1, add=False)


def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode the messages and add them to `out` in row order; see `terrace.comm.codecs`."""
    _decode(messages, wire, out[None], summed=messages.shape[0], add=True)


def _decode(messages: Tensor, wire: WireFormat, out: Tensor, *, summed: int, add: bool) -> None:
    rows, numel = out.shape
    for full, first, programs in _launches(numel, wire.block):
        decode_kernel[(programs, rows)](
            out,
            messages.view(torch.int8),
            messages.view(torch.int16),
            numel,
            out.stride(0),
            messages.stride(0),
            message_parts(wire, numel).codes,
            first,
            SUMMED=summed,
            FULL=full,
            ADD=add,
            KIND=_KINDS[wire.codec],
            BLOCKS=_blocks(wire.block),
            BLOCK=wire.block,
            enable_fp_fusion=False,
        )


def _blocks(block: int) -> int:
    return max(1, TILE // block)


def _launches(numel: int, block: int) -> list[tuple[bool, int, int]]:
    # (all blocks full, first block, programs)
    programs = numel // block // _blocks(block)
    done = programs * _blocks(block)
    launches = [(True, 0, programs)] if programs else []
    return [*launches, (False, done, 1)] if done * block < numel else launches
