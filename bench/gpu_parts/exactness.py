"""The engine on the device: against the CPU in fp64, and against itself with the device idle at every instruction."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from bench.common import ADAMW, decoder, engine_of, local_cluster, micro_batches
from bench.gpu_parts.setting import Row, Setting
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.model.liger import serve
from terrace.model.part_kernel import PartChoice
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.step_sums import StepResult

PARITY = 1e-10
STREAM_TOLERANCE = 1e-3  # atomics in backward kernels reorder fp32 sums; a buffer read too early differs far more


def rows(setting: Setting, which: str) -> Iterator[Row]:
    """Those of `parity` or of `streams`."""
    yield from {"parity": parity, "streams": streams}[which](setting)


def new_engine(
    config: ModelConfig,
    plan: Plan,
    device: str,
    micros: int,
    *,
    watch: Callable[[], object],
    compiled: bool = False,
    kernels: PartChoice = "torch",
) -> Engine:
    """An engine on one rank; `watch` is called at every instruction."""

    def progress(counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        watch()

    def initial(block: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return initial_value(config, block, name, shape, seed=0)

    # On meta: the engine fills its own buffers from `initial`.
    cluster = local_cluster({"node": 1})
    options = {"device": device, "initial": initial, "progress": progress, "compiled": compiled}
    blocks = build_blocks(config)
    serve(blocks, kernels, torch.device(device))
    return engine_of(blocks, cluster, plan, micros, **options)


def parity(setting: Setting) -> Iterator[Row]:
    """The device against the CPU in fp64."""
    config = decoder(64, 3, tied=True)
    cluster = local_cluster({"node": 1})
    for name in ("ddp", "zero3"):
        for recompute in ((), ("*",)):
            plan = replace(preset(name, cluster), compute="fp64", master="fp64", recompute=recompute)
            first, second = (_train(config, plan, where, 5, 2, (2, 32)) for where in ("cpu", setting.device))
            worst = _difference(second, first)
            label = f"parity fp64, {name}{', recompute' if recompute else ''}"
            yield Row(label, f"{worst:.1e} (limit {PARITY:.0e})", worst <= PARITY)


def streams(setting: Setting) -> Iterator[Row]:
    """The engine against itself with an idle device before every instruction."""
    config = decoder(setting.size(1024, 64), setting.size(6, 2))
    shape = (setting.size(4, 1), setting.size(256, 32))
    steps = setting.size(10, 2)
    # A master dtype of its own forces gradient buffers and their reduction on the lane.
    base = replace(preset("zero3", local_cluster({"node": 1})), compute="fp32", master="fp64", prefetch=2)
    plans = {
        "fp32": (base, STREAM_TOLERANCE),
        "fp32, recompute": (replace(base, recompute=("layers.*",)), STREAM_TOLERANCE),
        "bf16": (replace(base, compute="bf16", master="fp32"), 50 * STREAM_TOLERANCE),
    }
    for name, (plan, limit) in plans.items():
        free = _train(config, plan, setting.device, steps, 3, shape)
        idle = _train(config, plan, setting.device, steps, 3, shape, watch=setting.finish)
        worst = _difference(free, idle)
        yield Row(f"streams {name}", f"{worst:.1e} (limit {limit:.0e})", worst <= limit)


def _train(
    config: ModelConfig,
    plan: Plan,
    device: str,
    steps: int,
    micros: int,
    shape: tuple[int, int],
    watch: Callable[[], object] = lambda: None,
) -> list[StepResult]:
    engine = new_engine(config, plan, device, micros, watch=watch)
    results = []
    for number in range(steps):
        batches = micro_batches(number, 0, micros, shape, config.vocab_size)
        results.append(engine.step([Batch(*(part.to(device) for part in batch)) for batch in batches], ADAMW.lr))
    engine.drain()
    engine.close()
    return results


def _difference(first: Sequence[StepResult], second: Sequence[StepResult]) -> float:
    # The largest relative difference of loss or gradient norm over the steps.
    pairs = [
        pair for a, b in zip(first, second, strict=True) for pair in ((a.loss, b.loss), (a.grad_norm, b.grad_norm))
    ]
    return max(abs(a - b) / abs(b) for a, b in pairs)
