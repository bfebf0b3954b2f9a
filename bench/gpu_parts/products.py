"""Products of matrices: in a burst, for a third of a minute, and while copies run beside them.

A device at its power limit lowers its clock, so the sustained rate is the one that a run has.
"""

import time
from collections.abc import Iterator
from functools import partial

import torch

from bench.gpu_parts.setting import SKIPPED, Row, Setting

SUSTAINED_S = 20.0
SHAPES = ((8192, 8192, 8192), (8192, 2048, 5504), (4096, 4096, 14336))  # rows, depth, columns


def rows(setting: Setting) -> Iterator[Row]:
    """bf16 by shape, beside copies, then sustained."""
    for shape in SHAPES:
        yield Row(f"bf16 {' x '.join(map(str, _sized(setting, shape)))}", _rate(setting, shape))
    yield from _beside_copies(setting)
    yield _sustained(setting)


def _sized(setting: Setting, shape: tuple[int, int, int]) -> tuple[int, ...]:
    return tuple(setting.size(size, 64) for size in shape)


def _rate(setting: Setting, shape: tuple[int, int, int]) -> str:
    rows_, depth, columns = _sized(setting, shape)
    left = torch.randn(rows_, depth, device=setting.device).to(torch.bfloat16)
    right = torch.randn(columns, depth, device=setting.device).to(torch.bfloat16)  # (out, in), as a weight lies
    rate = 2 * rows_ * depth * columns / setting.median_s(partial(torch.mm, left, right.t()))
    return f"{rate / 1e12:.0f} TFLOP/s, {rate / setting.peak_tflops / 1e12:.0%} of the bf16 peak"


def _beside_copies(setting: Setting) -> Iterator[Row]:
    # A message takes memory bandwidth as such a copy does, and on the way to a host the copy engines.
    if not setting.is_cuda:
        yield Row("bf16 beside copies", "a CPU has no streams", without=SKIPPED)
        return
    size, stream = setting.size(8192, 64), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    left, right = (torch.randn(size, size, device=setting.device).to(torch.bfloat16) for _ in range(2))
    here = torch.zeros(setting.size(1 << 30, 1 << 16), dtype=torch.uint8, device=setting.device)
    host = torch.empty_like(here, device="cpu").pin_memory()
    # So many that they take longer than the products, which then never run alone.
    kinds = {"on the device": (torch.empty_like(here), 80), "to the host": (host, 2)}

    def products() -> None:
        for _ in range(20):
            torch.mm(left, right.t())

    alone_s = setting.median_s(products, 5)
    for name, (target, number) in kinds.items():

        def both(target: torch.Tensor = target, number: int = number) -> None:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(number):
                    target.copy_(here, non_blocking=True)
            products()

        beside_s = setting.median_s(both, 5)
        setting.finish()
        yield Row(f"bf16 beside copies {name}", f"{beside_s / alone_s:.2f} times the seconds of products alone")


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
