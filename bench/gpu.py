"""To be run once on a machine with a CUDA device; says so and exits 0 on a machine without one.

    parity     a tiny fp64 decoder under several plans: loss and gradient norm on CUDA against the CPU
    streams    the engine against itself with the device idle before every instruction: a buffer that is
               reused or read too early shows as a difference
    copies     bandwidth on the device, and from and to pinned host memory
    codecs     block codecs: the reference bit for bit, and bandwidth against a copy (target 70 %)
    training   a Llama-style stack of about 1 B parameters in bf16: step time, share of the peak (MFU),
               breakdown of the time, peak memory

MFU counts three times the matrix products of a forward pass, attention as the full square, and nothing for
recomputation.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from bench.claims import print_table
from bench.common import ADAMW, decoder, engine_of, local_cluster, micro_batches
from bench.gpu_codecs import codec_rows
from terrace.model.config import ModelConfig, forward_flops, num_params
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.step_sums import StepResult

PARITY = 1e-10
STREAM_TOLERANCE = 1e-3  # atomics in backward kernels reorder fp32 sums; a buffer read too early differs far more

Row = tuple[str, str, bool]  # subject, result, whether it passes


def new_engine(config: ModelConfig, plan: Plan, device: str, micros: int, watch: Callable[[], object]) -> Engine:
    """An engine on one rank; `watch` is called at every instruction."""

    def progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        watch()

    def initial(block: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return initial_value(config, block, name, shape, seed=0)

    # On meta: the engine fills its own buffers from `initial`.
    cluster = local_cluster({"node": 1})
    return engine_of(build_blocks(config), cluster, plan, micros, device=device, initial=initial, progress=progress)


def train(
    config: ModelConfig,
    plan: Plan,
    device: str,
    *,
    steps: int,
    micros: int,
    shape: tuple[int, int],
    watch: Callable[[], object] = lambda: None,
) -> list[StepResult]:
    """Train for some steps and return their results."""
    engine = new_engine(config, plan, device, micros, watch)
    results = []
    for number in range(steps):
        batches = [
            (tokens.to(device), labels.to(device))
            for tokens, labels in micro_batches(number, 0, micros, shape, config.vocab_size)
        ]
        results.append(engine.step([Batch(*batch) for batch in batches], ADAMW.lr))
    engine.drain()
    engine.close()
    return results


def difference(first: Sequence[StepResult], second: Sequence[StepResult]) -> float:
    """The largest relative difference of loss or gradient norm over the steps."""
    pairs = [
        pair for a, b in zip(first, second, strict=True) for pair in ((a.loss, b.loss), (a.grad_norm, b.grad_norm))
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def parity() -> list[Row]:
    """CUDA against the CPU in fp64."""
    config = decoder(64, 3, tied=True)
    cluster = local_cluster({"node": 1})
    rows: list[Row] = []
    for name in ("ddp", "zero3"):
        for recompute in ((), ("*",)):
            plan = replace(preset(name, cluster), compute="fp64", master="fp64", recompute=recompute)
            cpu, cuda = (train(config, plan, where, steps=5, micros=2, shape=(2, 32)) for where in ("cpu", "cuda"))
            worst = difference(cuda, cpu)
            label = f"parity fp64, {name}{', recompute' if recompute else ''}"
            rows.append((label, f"{worst:.1e} (limit {PARITY:.0e})", worst <= PARITY))
    return rows


def streams() -> list[Row]:
    """The engine against itself with an idle device before every instruction."""
    config = decoder(1024, 6)
    # A master dtype of its own forces gradient buffers and their reduction on the lane.
    base = replace(preset("zero3", local_cluster({"node": 1})), compute="fp32", master="fp64", prefetch=2)
    plans = {
        "fp32": (base, STREAM_TOLERANCE),
        "fp32, recompute": (replace(base, recompute=("layers.*",)), STREAM_TOLERANCE),
        "bf16": (replace(base, compute="bf16", master="fp32"), 50 * STREAM_TOLERANCE),
    }
    rows: list[Row] = []
    for name, (plan, limit) in plans.items():
        free = train(config, plan, "cuda", steps=10, micros=3, shape=(4, 256))
        idle = train(config, plan, "cuda", steps=10, micros=3, shape=(4, 256), watch=torch.cuda.synchronize)
        worst = difference(free, idle)
        rows.append((f"streams {name}", f"{worst:.1e} (limit {limit:.0e})", worst <= limit))
    return rows


def copies(num_bytes: int = 1 << 30) -> list[Row]:
    """Bandwidth of copies; on the device a byte counts twice, once read and once written."""
    host = torch.empty(num_bytes, dtype=torch.uint8).pin_memory()
    first, second = (torch.zeros(num_bytes, dtype=torch.uint8, device="cuda") for _ in range(2))
    kinds = [
        ("on the device", second, first, 2),
        ("host to device", first, host, 1),
        ("device to host", host, first, 1),
    ]
    rows: list[Row] = []
    for name, target, source, factor in kinds:
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rows.append((f"copy {name}", f"{factor * num_bytes / statistics.median(times) / 1e9:.0f} GB/s", True))
    return rows


def training(options: argparse.Namespace) -> list[Row]:
    """A stack of the 1 B class in bf16 with fp32 master copies."""
    config = decoder(options.hidden, options.layers, vocab=32000)
    plan = replace(
        preset(options.preset, local_cluster({"node": 1})),
        compute="bf16",
        recompute=("layers.*",) if options.recompute else (),
    )
    torch.cuda.reset_peak_memory_stats()
    engine = new_engine(config, plan, "cuda", options.micros, lambda: None)
    shape = (options.batch, options.sequence)
    batches = [
        (tokens.cuda(), labels.cuda())
        for tokens, labels in micro_batches(0, 0, options.micros, shape, config.vocab_size)
    ]
    times, results = [], []
    for _ in range(options.steps + 3):
        begin = time.perf_counter()
        results.append(
            engine.step([Batch(*batch) for batch in batches], 1e-4)
        )  # ends with a read of the loss, so the device is done
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    step_s = statistics.median(times[3:])
    flops = 3 * options.micros * sum(forward_flops(config, block, *shape) for block in range(config.num_blocks))
    tokens = options.micros * options.batch * options.sequence
    parts = sorted(results[-1].time_s.items(), key=lambda item: -item[1])
    label = f"{num_params(config) / 1e9:.2f} B bf16, {options.preset}, {options.micros} x {shape[0]} x {shape[1]}"
    first, last = results[0].loss, results[-1].loss
    return [
        (f"step of {label}", f"{step_s * 1e3:.1f} ms, {tokens / step_s:.0f} tokens/s", True),
        (
            f"MFU of a peak of {options.peak_tflops:g} TFLOP/s",
            f"{flops / step_s / options.peak_tflops / 1e12:.1%}",
            True,
        ),
        ("time", ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in parts[:6]), True),
        ("peak memory", f"{torch.cuda.max_memory_allocated() / 1e9:.1f} GB", True),
        ("loss on one batch", f"{first:.3f} -> {last:.3f}", last < first),
    ]


def main() -> int:
    """Print the table; return 1 when a check fails, 0 without a CUDA device."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"hidden": 2048, "layers": 18, "batch": 4, "sequence": 2048, "micros": 2, "steps": 10}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--preset", default="ddp")
    parser.add_argument("--recompute", action="store_true", help="recompute the layers in the backward")
    parser.add_argument(
        "--peak-tflops", type=float, default=989.4, help="dense bf16; default: the data sheet of H100 SXM"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device here: nothing was run")
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}\n")
    rows = [*parity(), *streams(), *copies(), *codec_rows(), *training(options)]
    print_table(["what", "found", ""], [[what, found, "ok" if good else "WRONG"] for what, found, good in rows])
    return 0 if all(good for _, _, good in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
