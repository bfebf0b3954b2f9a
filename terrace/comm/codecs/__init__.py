"""Block codecs: messages of 8 or 4 bits per element with a scale for every block, and sparse messages.

A message of n elements in blocks of B is `wire.message_bytes(n)` bytes: the ceil(n / B) scales as bf16 in the
machine's byte order, then the codes, then zeros. The last block may be short.

    int8   one signed byte per element, -127 .. 127
    fp8    one byte per element, e4m3 (no inf; largest 448)
    int4   two elements -7 .. 7 per signed byte, low + 16 high: with m elements in a block and h = ceil(m / 2),
           byte i holds elements i (low) and h + i (high; 0 where there is none)

Every implementation does the same fp32 arithmetic and agrees bit for bit, whatever the number of rows, the strides
and the device. For a block with largest magnitude a, on a grid up to q (127, 7 or 448):

    scale s = bf16(a * r), rounded up, with r the largest fp32 not above 1 / q;
              at least 2^-126, and at most the largest for which s q is a finite bf16
    code    = round half even(x * fp32(1 / s)), at most q in magnitude
    decoded = code * s (exact in fp32), rounded to the output's dtype

so with a / q (1 - 2^-22) <= s <= max(2^-126, a / q (1 + 2^-7 + 2^-22)) unless s is capped, the error of an element is

    int8, int4   |x - x^| <= s / 2 + |x| 2^-22
    fp8          |x - x^| <= max(|x| / 16, s 2^-10) + |x| 2^-22

and for a > 2^127 in int8, where s is capped at 2^121, at most s. Inputs in fp64 are rounded to fp32 first. Decoded
values encode to the same bytes again: always in fp8 and int4, in int8 if every block holds a code of 127 (a scale
that was rounded up can leave 126 as the largest).

With error feedback, a message encodes v = values + residual (in fp32), and the residual becomes v - v^. So the sum of
k decoded messages differs from the sum of k inputs only by the last residual, which is one rounding step, and the
fp32 rounding of v.

A block codec cannot represent inf or nan: the scale of a block with either is NaN, so the whole block decodes to NaN.
The sums of the step then show it on every rank at once (terrace.runtime.step_sums), without a device synchronization.

Sparse messages (`topk`) are described in `sparse.py`, their definition, which also runs on CUDA; on a CPU
`sparse_cpu.py` encodes them. Feedback and non-finite elements are as above, but only the kept elements of a block
with inf or nan decode to NaN.

Packed messages (`packed`) return the bits of bf16 and are described in `packed.py`; a message may say that it does not
fit (`packed.too_wide`), and whoever sends it then sends the plain values as well.

`reference.py` is the definition of the others and `cpu.py` their CPU implementation. On CUDA `cuda.py` launches the
kernels of `kernels.py` if Triton is installed, else the reference runs. Only definitions allocate in proportion to a
message, and sparse encoding and decoding in proportion to the elements that are kept.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from terrace.comm.codecs import cpu, packed, reference, sparse, sparse_cpu
from terrace.plan.wire import WireFormat

__all__ = ["MAX_SAMPLE", "backend", "decode", "decode_add", "encode", "error_sums"]

MAX_SAMPLE = 1 << 16  # elements of a sample for measuring the error: a choice, about 0.2 ms on a CPU core
_ELEMENTS = (torch.float64, torch.float32, torch.bfloat16)


@torch.no_grad()
def encode(values: Tensor, wire: WireFormat, out: Tensor, residual: Tensor | None = None) -> None:
    """Encode each row of `values` [rows, n] into `out` [rows, wire.message_bytes(n)], uint8.

    `values` is fp64, fp32 or bf16. Rows may be strided; rows of `out` start at even bytes. With a `residual` [rows,
    n], fp32, `values + residual` is encoded, and the rounding errors are written to `residual`.
    """
    _check(values, wire, out)
    if residual is not None:
        assert residual.dtype == torch.float32, f"a residual of {residual.dtype}; it is fp32"
        assert residual.shape == values.shape, f"a residual {tuple(residual.shape)} of values {tuple(values.shape)}"
    if not values.numel():
        return
    _implementation(values.device, wire).encode(values, wire, out, residual)


@torch.no_grad()
def decode(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode `messages` [rows, bytes], uint8, into `out` [rows, n], fp64, fp32 or bf16."""
    _check(out, wire, messages)
    if not out.numel():
        return
    _implementation(out.device, wire).decode(messages, wire, out)


@torch.no_grad()
def decode_add(messages: Tensor, wire: WireFormat, out: Tensor) -> None:
    """Decode `messages` [rows, bytes], uint8, and add them to `out` [n], fp32 or fp64, in row order."""
    assert out.ndim == 1, f"decode_add sums rows into one dim, not into {tuple(out.shape)}"
    assert out.dtype in (torch.float32, torch.float64), f"a sum in {out.dtype} would round after every row"
    _check(out.expand(messages.shape[0], -1), wire, messages)
    if not out.numel() or not messages.shape[0]:
        return
    _implementation(out.device, wire).decode_add(messages, wire, out)


@torch.no_grad()
def error_sums(values: Tensor, wire: WireFormat) -> Tensor:
    """[sum of (x - x^)^2, sum of x^2], fp64, for a sample `values` [m] that starts at a block.

    m is at most `MAX_SAMPLE`. The result stays on the sample's device.
    """
    assert values.ndim == 1, f"a sample has one dim, not {values.ndim}"
    assert values.numel() <= MAX_SAMPLE, f"a sample of {values.numel()} elements; at most {MAX_SAMPLE}"
    message = torch.empty(1, wire.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
    decoded = torch.empty(1, values.numel(), dtype=torch.float32, device=values.device)
    encode(values[None], wire, message)
    decode(message, wire, decoded)
    exact = values.to(torch.float64)
    return torch.stack([(exact - decoded[0]).square().sum(), exact.square().sum()])


def backend(device: torch.device) -> str:
    if device.type == "cpu":
        return f"torch {torch.__version__} on the CPU"
    if not _has_triton():
        return "torch: triton is not installed"
    return f"triton {import_module('triton').__version__} kernels"


def _implementation(device: torch.device, wire: WireFormat) -> ModuleType:
    if wire.packed:
        return packed
    if wire.kept_of:
        return sparse_cpu if device.type == "cpu" else sparse
    if device.type == "cpu":
        return cpu
    # The CUDA module needs Triton at import time.
    return import_module("terrace.comm.codecs.cuda") if _has_triton() else reference


def _check(values: Tensor, wire: WireFormat, messages: Tensor) -> None:
    assert wire.block, f"{wire.name} is a dtype, not a block codec"
    assert values.dtype in _ELEMENTS, f"elements of {values.dtype}; a codec takes {_ELEMENTS}"
    assert messages.dtype == torch.uint8, f"messages of {messages.dtype}; they are uint8"
    expected = (values.shape[0], wire.message_bytes(values.shape[1]))
    assert tuple(messages.shape) == expected, f"messages {tuple(messages.shape)}; {wire.name} needs {expected}"
    assert values.device == messages.device, f"values on {values.device}, messages on {messages.device}"
    odd = messages.stride(0) % 2 or int(messages.storage_offset()) % 2
    assert not (odd and messages.numel()), "a message begins at an odd byte"


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None
