"""Sustained rates of a device under load, and attention by each kernel that torch has.

A device at its power limit lowers its clock, so a short loop on a cool one shows a rate that no run sustains. The probe
therefore begins with products for half a minute, reports how far their rate fell, and measures everything else on the
warm device.
"""

import time
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from terrace.comm.collectives import DTYPES
from terrace.probe.fit import AttentionSample
from terrace.probe.samples import Sustained
from terrace.probe.timing import Stopwatch

HEAT_S = {"cpu": 0.0, "cuda": 30.0}  # ranks of a CPU share it with others; its clock tells nothing of theirs
_CUBE = {"cpu": 256, "cuda": 8192}
_FEW_S = 0.5  # of the burst, and a reading thereafter
_LAST = 0.25  # the part of the time whose mean rate counts as sustained
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}


def measure_sustained(watch: Stopwatch, name: str, seconds: float, say: Callable[[str], None]) -> Sustained:
    """Time square products in the dtype `name` for `seconds`: their initial rate, and that of the last quarter."""
    say(f"matrix products for {seconds:g} s")
    size, device = _CUBE[watch.device.type], watch.device
    left, right = (torch.randn(size, size, device=device).to(DTYPES[name]) for _ in range(2))
    out, flops = torch.empty_like(left), 2 * size**3

    def product() -> None:
        torch.mm(left, right.t(), out=out)

    reading_s = min(_FEW_S, seconds / 8)
    readings = list[tuple[float, float]]()  # (seconds since the beginning, FLOP/s)
    watch.host_loop_s(product, 1)  # the first call loads the library
    once_s = watch.host_loop_s(product, 2)
    calls = max(1, round(reading_s / once_s))
    begin_s = time.perf_counter()
    while (now_s := time.perf_counter() - begin_s) < seconds or not readings:
        readings.append((now_s, flops / watch.host_loop_s(product, calls)))
    late = [rate for at_s, rate in readings if at_s >= (1 - _LAST) * seconds] or [readings[-1][1]]
    return Sustained(
        seconds=seconds, burst_flops_per_s=watch.mean(readings[0][1]), flops_per_s=watch.mean(sum(late) / len(late))
    )


def measure_speeds(watch: Stopwatch, dtype: str, seconds: float) -> tuple[float, ...]:
    """FLOP/s of square products of every rank, all at once, for about `seconds`. Every rank calls this."""
    size = _CUBE[watch.device.type]
    left, right = (torch.randn(size, size, device=watch.device).to(DTYPES[dtype]) for _ in range(2))
    out = torch.empty_like(left)

    def product() -> None:
        torch.mm(left, right.t(), out=out)

    watch.host_loop_s(product, 1)
    # The same number on all, or the faster would measure while the others rest.
    calls = max(1, round(seconds / watch.largest(watch.host_loop_s(product, 2))))
    return watch.each(2 * size**3 / watch.host_loop_s(product, calls))


def measure_kernels(watch: Stopwatch, shape: AttentionSample, budget_s: float) -> dict[str, AttentionSample]:
    """Time causal attention of `shape` by each of torch's kernels that supports it on this device."""
    sizes = (shape.batch, shape.heads, shape.sequence, shape.head_dim)
    query, key, value = (
        torch.randn(sizes, device=watch.device, dtype=DTYPES[shape.dtype], requires_grad=True) for _ in range(3)
    )
    found = dict[str, AttentionSample]()
    for name, kernel in KERNELS.items():

        def attend(kernel: SDPBackend = kernel) -> Tensor:
            with sdpa_kernel(kernel):
                return F.scaled_dot_product_attention(query, key, value, is_causal=True)

        # Every rank must take part in a measurement, so a kernel that one rank lacks is skipped on all.
        if not watch.largest(0.0 if _runs(attend) else 1.0):
            forward_s, backward_s = watch.both_ways(attend, budget_s / len(KERNELS))
            found[name] = AttentionSample(
                dtype=shape.dtype,
                batch=shape.batch,
                heads=shape.heads,
                head_dim=shape.head_dim,
                sequence=shape.sequence,
                forward_s=forward_s,
                backward_s=backward_s,
            )
    return found


def _runs(attend: Callable[[], Tensor]) -> bool:
    try:
        with warnings.catch_warnings(action="ignore"):  # torch says at length why each other kernel was not taken
            out = attend()
            torch.autograd.backward(out, torch.ones_like(out))
    except RuntimeError:  # not built, not for this device, shape or dtype, or no memory for the scores
        return False
    return True
