"""Block codecs on the device: bits against the reference, bandwidth against copies.

Bytes moved by an encode are the elements read and the message written, by a decode the reverse. The limit is the rate
of a copy on the same device in the same run, a byte counting twice, once read and once written; the target is 70 % of
it.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch

from bench.gpu_parts.setting import Row, Setting
from terrace.comm import codecs
from terrace.comm.codecs import reference
from terrace.plan.wire import WireFormat, parse_format

TARGET = 0.7
NUM_ELEMENTS = 1 << 28  # 512 MiB of bf16: far out of any cache
NUM_COMPARED = (1 << 20) + 77  # with a short last block


def rows(setting: Setting) -> Iterator[Row]:
    """Bits and bandwidths of each format."""
    numel, compared = setting.size(NUM_ELEMENTS, 1 << 14), setting.size(NUM_COMPARED, 4096 + 77)
    source, target = (torch.zeros(2 * numel, dtype=torch.uint8, device=setting.device) for _ in range(2))
    limit = 2 * source.numel() / setting.median_s(partial(target.copy_, source))
    words = codecs.backend(torch.device(setting.device))
    yield Row("codecs", words, "kernels" in words or not setting.is_cuda)  # the reference would be many times slower
    for text in ("int8", "int4", "fp8"):
        wire = parse_format(text)
        same = equals_reference(wire, compared, setting.device)
        yield Row(f"{text}, {compared} elements", "bits of the reference" if same else "OTHER BITS", same)
        for name, (num_bytes, work) in operations(wire, numel, setting.device).items():
            speed = num_bytes / setting.median_s(work)
            found = f"{speed / 1e9:.0f} GB/s, {speed / limit:.0%} of a copy"
            yield Row(f"{text} {name}", found, setting.goal(speed >= TARGET * limit), f"{TARGET:.0%}")


def equals_reference(wire: WireFormat, numel: int, device: str) -> bool:
    """Whether messages, residuals, elements and sums equal the reference's on the CPU."""
    rng = torch.Generator().manual_seed(0)
    values = torch.randn(2, numel, generator=rng).mul_(0.01).to(torch.bfloat16)
    residual = torch.randn(2, numel, generator=rng).mul_(1e-5)
    message = torch.empty(2, wire.message_bytes(numel), dtype=torch.uint8)
    total, there_total = torch.zeros(numel), torch.zeros(numel, device=device)
    there_residual, there = residual.to(device, copy=True), message.to(device, copy=True)
    decoded = torch.empty(2, numel, dtype=torch.bfloat16, device=device)
    codecs.encode(values.to(device), wire, there, there_residual)
    codecs.decode(there, wire, decoded)
    codecs.decode_add(there, wire, there_total)
    reference.encode(values, wire, message, residual)
    reference.decode(message, wire, values)
    reference.decode_add(message, wire, total)
    pairs = ((message, there), (residual, there_residual), (values, decoded), (total, there_total))
    return all(torch.equal(expected, found.cpu()) for expected, found in pairs)


def operations(wire: WireFormat, numel: int, device: str) -> dict[str, tuple[int, Callable[[], None]]]:
    """Bytes moved by each operation, and the operation."""
    values = torch.randn(1, numel, dtype=torch.bfloat16, device=device)
    message = torch.empty(1, wire.message_bytes(numel), dtype=torch.uint8, device=device)
    residual = torch.zeros(1, numel, device=device)
    wide_bytes, narrow_bytes, fp32_bytes = (part.numel() * part.element_size() for part in (values, message, residual))
    return {
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
