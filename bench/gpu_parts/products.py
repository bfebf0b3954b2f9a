"""Products of matrices: in a burst, for half a minute, beside messages' kernels, and in fp8.

A device at its power limit lowers its clock, so the sustained rate is the one that a run has.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu_parts.setting import Row, Setting

SUSTAINED_S = 30.0
SHAPES = ((8192, 8192, 8192), (8192, 2048, 5504), (4096, 4096, 14336))  # rows, depth, columns


def rows(setting: Setting) -> Iterator[Row]:
    """bf16 by shape, then sustained, then fp8."""
    for shape in SHAPES:
        yield Row(f"bf16 {' x '.join(map(str, _sized(setting, shape)))}", _rate(setting, shape, fp8=False))
    yield _sustained(setting)
    for shape in SHAPES[:1]:
        try:
            yield Row(f"fp8 {' x '.join(map(str, _sized(setting, shape)))}", _rate(setting, shape, fp8=True))
        except (RuntimeError, ValueError, NotImplementedError) as error:
            yield Row("fp8", f"refused: {' '.join(str(error).split())[:120]}")


def _sized(setting: Setting, shape: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(setting.size(size, 64) for size in shape)


def _rate(setting: Setting, shape: tuple[int, int, int], *, fp8: bool) -> str:
    rows_, depth, columns = _sized(setting, shape)
    left = torch.randn(rows_, depth, device=setting.device).to(torch.bfloat16)
    right = torch.randn(columns, depth, device=setting.device).to(torch.bfloat16)  # (out, in), as a weight lies
    work = partial(torch.mm, left, right.t())
    if fp8:
        one = torch.ones((), device=setting.device)
        first, second = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
        work = partial(torch._scaled_mm, first, second.t(), one, one, out_dtype=torch.bfloat16)
    rate = 2 * rows_ * depth * columns / setting.median_s(work)
    return f"{rate / 1e12:.0f} TFLOP/s, {rate / setting.peak_tflops / 1e12:.0%} of the bf16 peak"


def _sustained(setting: Setting) -> Row:
    # Rates of the first second and of the last quarter.
    size = setting.size(8192, 64)
    left, right = (torch.randn(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
    out, end_s = torch.empty_like(left), setting.size(int(SUSTAINED_S), 1)
    calls, samples = setting.size(50, 2), list[tuple[float, float]]()
    begin_s = time.perf_counter()
    while (now_s := time.perf_counter() - begin_s) < end_s:
        for _ in range(calls):
            torch.mm(left, right.t(), out=out)
        setting.finish()
        samples.append((now_s, calls * 2 * size**3 / (time.perf_counter() - begin_s - now_s)))
    burst = max(rate for _, rate in samples[1:6] or samples)
    late = [rate for at_s, rate in samples if at_s > 0.75 * end_s] or [samples[-1][1]]
    sustained = sum(late) / len(late)
    found = f"{sustained / 1e12:.0f} TFLOP/s after {end_s} s, {sustained / burst:.2f} of the burst's{_clock(setting)}"
    return Row("bf16, sustained", found)


def _clock(setting: Setting) -> str:
    try:
        return f", clock {torch.cuda.clock_rate()} MHz" if setting.is_cuda else ""
    except Exception:  # needs a package that may not be there; the rate is measured anyway
        return ""
