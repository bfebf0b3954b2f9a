"""Block codecs on a CUDA device, a section of `gpu.py`: bits against the reference, bandwidth against copies.

Bytes moved by an encode are the elements read and the message written, by a decode the reverse. The limit is the rate
of a copy on the same device in the same run, a byte counting twice, once read and once written; the target is 70 % of
it.
"""

import statistics
from collections.abc import Callable

import torch

from terrace.comm import codecs
from terrace.comm.codecs import reference
from terrace.plan.wire import WireFormat, parse_format

TARGET = 0.7
NUM_ELEMENTS = 1 << 28  # 512 MiB of bf16: far out of any cache
NUM_COMPARED = (1 << 20) + 77  # with a short last block

Row = tuple[str, str, bool]


def codec_rows() -> list[Row]:
    """Rows of the table."""
    limit = copy_bytes_per_s()
    rows: list[Row] = [("codecs", codecs.backend(torch.device("cuda")), True)]
    for text in ("int8", "int4", "fp8"):
        wire = parse_format(text)
        same = equals_reference(wire)
        rows.append((f"{text}, {NUM_COMPARED} elements", "bits of the reference" if same else "OTHER BITS", same))
        for name, speed in bandwidths(wire).items():
            share = speed / limit
            found = f"{speed / 1e9:.0f} GB/s, {share:.0%} of a copy (target {TARGET:.0%})"
            rows.append((f"{text} {name}", found, share >= TARGET))
    return rows


def equals_reference(wire: WireFormat) -> bool:
    """Whether messages, residuals, elements and sums equal the reference's on the CPU."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(2, NUM_COMPARED, generator=rng).mul_(0.01).to(torch.bfloat16)
    residual = torch.randn(2, NUM_COMPARED, generator=rng).mul_(1e-5)
    message = torch.empty(2, wire.message_bytes(NUM_COMPARED), dtype=torch.uint8)
    total, there_total = torch.zeros(NUM_COMPARED), torch.zeros(NUM_COMPARED, device="cuda")
    there_residual, there = residual.to("cuda"), message.to("cuda")
    decoded = torch.empty(2, NUM_COMPARED, dtype=torch.bfloat16, device="cuda")
    codecs.encode(values.to("cuda"), wire, there, there_residual)
    codecs.decode(there, wire, decoded)
    codecs.decode_add(there, wire, there_total)
    reference.encode(values, wire, message, residual)
    reference.decode(message, wire, values)
    reference.decode_add(message, wire, total)
    pairs = ((message, there), (residual, there_residual), (values, decoded), (total, there_total))
    return all(torch.equal(expected, found.cpu()) for expected, found in pairs)


def bandwidths(wire: WireFormat) -> dict[str, float]:
    """Bytes moved per second by each operation."""
    values = torch.randn(1, NUM_ELEMENTS, dtype=torch.bfloat16, device="cuda")
    message = torch.empty(1, wire.message_bytes(NUM_ELEMENTS), dtype=torch.uint8, device="cuda")
    residual = torch.zeros(1, NUM_ELEMENTS, device="cuda")
    wide_bytes, narrow_bytes, fp32_bytes = (part.numel() * part.element_size() for part in (values, message, residual))
    moved: dict[str, tuple[int, Callable[[], None]]] = {
        "encode bf16": (wide_bytes + narrow_bytes, lambda: codecs.encode(values, wire, message)),
        "decode bf16": (wide_bytes + narrow_bytes, lambda: codecs.decode(message, wire, values)),
        "encode with feedback": (
            wide_bytes + narrow_bytes + 2 * fp32_bytes,
            lambda: codecs.encode(values, wire, message, residual),
        ),
        "decode_add to fp32": (
            narrow_bytes + 2 * fp32_bytes,
            lambda: codecs.decode_add(message, wire, residual[0]),
        ),
    }
    return {name: num_bytes / median_s(work) for name, (num_bytes, work) in moved.items()}


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy on the device."""
    source, target = (torch.zeros(2 * NUM_ELEMENTS, dtype=torch.uint8, device="cuda") for _ in range(2))
    return 2 * source.numel() / median_s(lambda: target.copy_(source))


def median_s(work: Callable[[], object], rounds: int = 20) -> float:
    """The median time of a call on the device, in seconds, by events; the first calls compile."""
    for _ in range(3):
        work()
    times: list[float] = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)
