"""Tensor messages between two devices: whole, in parts, and fused with products (`tensor_chunks`)."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bench.common import ADAMW, decoder, engine_of, local_cluster, micro_batches
from bench.gpu_parts.setting import SKIPPED, Row, Setting
from terrace.base.errors import TerraceError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import launch_local
from terrace.launch.world import World
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch

RANKS = 2
WAYS = (1, 2, 4, "fused")
PARITY = 1e-10
Found = tuple[list[float], list[float], float]  # losses and gradient norms of steps, and the median seconds of one


def rows(setting: Setting) -> Iterator[Row]:
    """Fused against whole messages in fp64, then the step of each way in bf16."""
    if setting.is_cuda and torch.cuda.device_count() < RANKS:
        yield Row("tensor rows on two devices", f"{torch.cuda.device_count()} CUDA device here", without=SKIPPED)
        return
    small, shape = decoder(64, 2), (2, 33)
    exact = {way: _run(setting, small, shape, way, "fp64") for way in (1, "fused")}
    yield _exact(exact[1], exact["fused"])
    # Two layers about as wide as an 8 B model's, and 8,192 tokens: long products and messages.
    wide = decoder(setting.size(4096, 64), 2, setting.size(32000, 257))
    shape, found = (setting.size(4, 1), setting.size(2048, 32)), dict[Any, Found]()
    for way in WAYS:
        subject = f"tensor_chunks = {way}"
        outcome = _run(setting, wide, shape, way, "bf16" if setting.is_cuda else "fp32")
        if isinstance(outcome, str):
            yield Row(subject, outcome, not setting.is_cuda)
            continue
        found[way] = outcome
        words = f"{outcome[2] * 1e3:.1f} ms, {found[1][2] / outcome[2]:.3f} times as fast as whole messages"
        yield Row(subject, words, abs(outcome[0][-1] - found[1][0][-1]) < 0.02 * found[1][0][-1])


def _exact(whole: "Found | str", fused: "Found | str") -> Row:
    subject = "parity fp64, fused against whole"
    if isinstance(whole, str) or isinstance(fused, str):
        # On a CPU there is no symmetric memory, and the run is refused.
        refused = fused if isinstance(fused, str) else ""
        return Row(subject, str(whole if isinstance(whole, str) else refused), "needs CUDA" in refused)
    pairs = zip((*whole[0], *whole[1]), (*fused[0], *fused[1]), strict=True)
    worst = max(abs(a - b) / abs(a) for a, b in pairs)
    return Row(subject, f"{worst:.1e} (limit {PARITY:.0e})", worst <= PARITY)


def _run(setting: Setting, config: ModelConfig, shape: tuple[int, int], way: Any, compute: Any) -> "Found | str":
    cluster = local_cluster({"node": RANKS})
    plan = replace(
        preset("ddp", cluster),
        mapping={"node": {"tensor": RANKS}},
        micro_batch=shape[0],
        compute=compute,
        master="fp64" if compute == "fp64" else "fp32",
        tensor_chunks=way,
    )
    arguments = (setting.is_cuda, config, cluster, plan, shape, setting.size(13, 3))
    try:
        found: Found = launch_local(RANKS, steps, arguments, say=lambda line: None)
    except TerraceError as error:
        return f"refused: {error}"
    return found


def steps(
    world: World,
    is_cuda: bool,
    config: ModelConfig,
    cluster: Cluster,
    plan: Plan,
    shape: tuple[int, int],
    number: int,
) -> Found:
    """Train on this rank: losses, gradient norms and the median seconds of a step."""
    device = f"cuda:{world.local_rank}" if is_cuda else "cpu"

    def initial(block: str, name: str, size: tuple[int, ...]) -> torch.Tensor:
        return initial_value(config, block, name, size, seed=0)

    options = {"device": device, "initial": initial, "rank": world.rank, "declared": block_specs(config)}
    engine = engine_of(build_blocks(config), cluster, plan, 1, sequence=shape[1], **options)
    batches = [Batch(*(part.to(device) for part in batch)) for batch in _batches(config, shape)]
    losses, norms, times_s = [], [], []
    for _ in range(number):
        begin_s = time.perf_counter()
        result = engine.step(batches, ADAMW.lr)
        times_s.append(time.perf_counter() - begin_s)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    engine.check_bytes()
    engine.close()
    return losses, norms, statistics.median(times_s[min(3, number - 1) :])


def _batches(config: ModelConfig, shape: tuple[int, int]) -> Sequence[tuple[torch.Tensor, ...]]:
    return micro_batches(0, 0, 1, shape, config.vocab_size)
