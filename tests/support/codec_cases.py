"""Inputs for the codecs, and the comparison of the Triton kernels with the reference, bit for bit.

As a program it compares on the CPU, for which Triton's interpreter must be on (TRITON_INTERPRET=1) before
anything imports Triton. Each access is checked to be inside its tensor, and kernels that leave theirs are found.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor

from terrace.comm import codecs
from terrace.comm.codecs import reference
from terrace.plan.wire import WireFormat, parse_format
from tests.support.triton_bounds import OutsideError, check_bounds

DTYPES = (torch.bfloat16, torch.float32, torch.float64)
CODECS = ("int8", "fp8", "int4")


def mixed(rows: int, numel: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return finite elements of very different magnitudes, some of them zero, subnormal or the largest there is."""
    rng = torch.Generator().manual_seed(seed)
    spread = 10.0 * torch.randn(rows, -(-numel // 16), generator=rng).repeat_interleave(16, dim=1)[:, :numel]
    values = (torch.randn(rows, numel, generator=rng) * spread.exp2()).to(dtype)
    kind = torch.randint(0, 500, (rows, numel), generator=rng)
    largest = torch.finfo(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32).max
    for number, special in enumerate((0.0, -0.0, 1e-40, -3e-39, 2.0**-126, largest, -largest)):
        values[kind == number] = special
    return values


def new_messages(wire: WireFormat, rows: int, numel: int, device: str = "cpu") -> Tensor:
    """Return messages full of rubbish."""
    return torch.full((rows, wire.message_bytes(numel)), 0xA5, dtype=torch.uint8, device=device)


def received(messages: Tensor, wire: WireFormat, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the elements [rows, numel] of messages."""
    out = torch.full((messages.shape[0], numel), 7.0, dtype=dtype)
    codecs.decode(messages, wire, out)
    return out


def fed_back(wire: WireFormat, dtype: torch.dtype, numel: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Inputs with their residuals, messages and new residuals of 12 messages of 2 rows with feedback.

    After the last, inputs - delivered = residual up to fp32 rounding.
    """
    residual = torch.zeros(2, numel)
    asked, delivered = (torch.zeros(2, numel, dtype=torch.float64) for _ in range(2))
    rng = torch.Generator().manual_seed(3)
    for _ in range(12):
        values = (torch.randn(2, numel, generator=rng) * 0.1 + 0.003).to(dtype)
        asked += values.double()
        total = values.float() + residual
        messages = new_messages(wire, 2, numel)
        codecs.encode(values, wire, messages, residual)
        delivered += received(messages, wire, numel).double()
        yield total, messages, residual
    assert ((asked - delivered) - residual.double()).abs().max() < 12 * 2.0**-22


def same(first: Tensor, second: Tensor) -> bool:
    """Return whether tensors agree bit for bit, any nan being like any other."""
    first, second = first.cpu(), second.cpu()
    if not first.dtype.is_floating_point:
        return torch.equal(first, second)
    equal = (first == second) & (first.signbit() == second.signbit())
    return bool((equal | (first.isnan() & second.isnan())).all())


def compare_kernels(device: str, wire: WireFormat, values: Tensor, turn: int) -> None:
    """Assert that every kernel equals the reference; on the CPU for one dtype of what is decoded, by `turn`."""
    cuda = import_module("terrace.comm.codecs.cuda")
    rows, numel = values.shape
    what = f"{wire.name}, {values.dtype}, {rows} x {numel}"
    here = values.to(device)

    expected, found = new_messages(wire, rows, numel), new_messages(wire, rows, numel, device)
    reference.encode(values, wire, expected)
    cuda.encode(here, wire, found)
    assert same(expected, found), f"encode {what}"
    for dtype in _of_turn(DTYPES, device, turn):
        plain, decoded = torch.empty(rows, numel, dtype=dtype), torch.empty(rows, numel, dtype=dtype, device=device)
        reference.decode(expected, wire, plain)
        cuda.decode(found, wire, decoded)
        assert same(plain, decoded), f"decode to {dtype}, {what}"

    for dtype in _of_turn((torch.float32, torch.float64), device, turn):
        total = mixed(1, numel, 1, torch.float32)[0].to(dtype)
        there = total.to(device, copy=True)
        reference.decode_add(expected, wire, total)
        cuda.decode_add(found, wire, there)
        assert same(total, there), f"decode_add to {dtype}, {what}"

    residual = mixed(rows, numel, 2).clamp(-1, 1)
    there = residual.to(device, copy=True)
    reference.encode(values, wire, expected, residual)
    cuda.encode(here, wire, found, there)
    assert same(expected, found), f"encode with feedback {what}"
    assert same(residual, there), f"residual {what}"


def _of_turn(dtypes: tuple[torch.dtype, ...], device: str, turn: int) -> tuple[torch.dtype, ...]:
    return dtypes if device == "cuda" else (dtypes[turn % len(dtypes)],)


def compare_all(device: str, sizes: tuple[tuple[int, int], ...], formats: tuple[str, ...]) -> None:
    """Compare over formats and (rows, elements), then inf and nan, and strided rows; dtypes take turns on the CPU."""
    for text in formats:
        wire = parse_format(text)
        for seed, (rows, numel) in enumerate(sizes):
            for dtype in _of_turn(DTYPES, device, seed):
                compare_kernels(device, wire, mixed(rows, numel, seed, dtype), seed + 1)
        poisoned = mixed(2, 3 * wire.block + 5, 3)
        poisoned[0, 1], poisoned[1, wire.block], poisoned[1, -1] = float("nan"), float("inf"), -float("inf")
        compare_kernels(device, wire, poisoned, 0)
        compare_kernels(device, wire, mixed(3, 2 * wire.block + 7, 4)[:, 3:-2], 1)


def faults() -> Iterator[str]:
    """Kernels that leave a tensor, by a few bytes: of values, of a message, of the residual. What is said of each."""
    cuda, wire, values = import_module("terrace.comm.codecs.cuda"), parse_format("int8:128"), mixed(2, 1000, 0)
    messages, residual = new_messages(wire, 2, 1000), torch.zeros(2, 1000)
    no_masks = patch.object(cuda, "_launches", lambda numel, block: [(True, 0, -(-numel // block // 32))])
    parts = cuda.message_parts(wire, 1000)
    late_codes = patch.object(cuda, "message_parts", lambda *_: replace(parts, codes=parts.codes + wire.block))
    for fault, given in ((no_masks, None), (late_codes, None), (nullcontext(), residual[:, :999])):
        try:
            with fault:
                cuda.encode(values, wire, messages, given)
        except OutsideError as error:
            yield str(error)


if __name__ == "__main__":
    check_bounds()
    compare_all("cpu", ((1, 4096 + 77), (2, 17), (1, 1)), ("int8:128", "fp8:128", "int4:128"))
    print(f"equal, triton {import_module('triton').__version__}")
    print(*faults(), sep="\n")
