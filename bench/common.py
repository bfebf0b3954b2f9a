"""Shared by the benchmarks: the model, its batches, turns that alternate."""

import argparse
import gc
import random
import resource
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.claims import options_for_claims
from bench.models import llama_of
from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.model.config import ModelConfig
from terrace.model.decoder import IGNORE_INDEX, build_blocks, token_loss
from terrace.model.init import initialise
from terrace.plan.plan import Plan
from terrace.runtime.engine import Engine
from terrace.runtime.objective import Objective
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload

ADAMW = OptimizerConfig(lr=1e-4)  # small, or rounding in bf16 grows into other losses within thirty steps
_HELP = {"batch": "sequences of a micro-batch", "micros": "micro-batches of a step"}

Step = Callable[[int], float]  # the number of a step -> its loss
Batch = tuple[Tensor, Tensor]


@dataclass
class Timing:
    """One contestant: wall and processor seconds and page faults of every timed step, and the loss of every step."""

    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    faults: list[int] = field(default_factory=list)  # minor ones: pages that memory was given anew


def decoder(hidden: int, layers: int, vocab: int = 257, *, tied: bool = False) -> ModelConfig:
    """A Llama-style decoder with heads of 32 or 128 elements and a gated MLP."""
    heads = hidden // (128 if hidden >= 1024 else 32)
    inner = -(-8 * hidden // 3 // 32) * 32
    return llama_of(hidden, layers, heads, heads, inner, vocab, tie_word_embeddings=tied)


def real_blocks(config: ModelConfig, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """The blocks of `config` with the values of seed 0, on the CPU."""
    blocks = build_blocks(config)
    initialise(blocks, config, seed=0, dtype=dtype)
    return blocks


def block_names(blocks: Sequence[nn.Module]) -> list[str]:
    """The names that patterns of a plan match."""
    return ["embedding", *(f"layers.{index}" for index in range(len(blocks) - 2)), "head"]


def engine_of(blocks: list[nn.Module], cluster: Cluster, plan: Plan, num_micros: int, **options: Any) -> Engine:
    """The engine on a decoder's blocks; `options` are those of `engine_with`."""
    given: dict[str, Any] = {"optimizer": ADAMW, "timeout": timedelta(seconds=120), "names": block_names(blocks)}
    given |= {"objective": token_loss, **options}
    return engine_with(blocks, cluster=cluster, plan=plan, num_micros=num_micros, **given)


def engine_with(modules: Sequence[nn.Module], *, objective: Objective, **options: Any) -> Engine:
    """An engine whose settings differ by case: `options` are fields of the values that it is made of."""

    def own(*names: str) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    blocks = Blocks(modules, **own("names", "declared", "freeze", "initial"))
    workload = Workload(**own("cluster", "plan", "num_micros", "sequence", "program", "is_verified"))
    training = Training(**own("optimizer", "balance", "compiled", "seed"))
    return Engine(blocks, workload, objective, training, RankSetup(**options))


def micro_batches(step: int, rank: int, num_micros: int, shape: tuple[int, int], vocab: int) -> list[Batch]:
    """A rank's micro-batches of a step; ten batches repeat, so that they can be learnt."""
    generator = torch.Generator().manual_seed(1000 * rank + step % 10)
    batches = []
    for _ in range(num_micros):
        tokens = torch.randint(0, vocab, shape, generator=generator)
        labels = tokens.roll(-1, dims=1)
        labels[:, -1] = IGNORE_INDEX
        batches.append((tokens, labels))
    return batches


def local_cluster(sizes: Mapping[str, int]) -> Cluster:
    """A cluster of CPU processes with these tiers; nothing here is planned, so its figures do not matter."""
    # A peak in fp8, or plans with products in 8 bits are refused.
    peaks = {"fp32": 1e10, "fp8": 1e10}
    device = Device(name="cpu", memory_bytes=1e12, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s=peaks)
    tier = Tier(name="any", size=1, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    return Cluster(
        name="bench", device=device, tiers=tuple(replace(tier, name=name, size=size) for name, size in sizes.items())
    )


def torch_adamw(parameters: Sequence[nn.Parameter], adamw: OptimizerConfig = ADAMW) -> torch.optim.AdamW:
    """Torch's fused AdamW: matrices decay, norms do not. DTensors and plain tensors are in groups of their own."""
    groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault((parameter.dim() >= 2, isinstance(parameter, DTensor)), []).append(parameter)
    decays = [{"params": own, "weight_decay": adamw.weight_decay * key[0]} for key, own in groups.items()]
    return torch.optim.AdamW(decays, lr=adamw.lr, betas=(adamw.beta1, adamw.beta2), eps=adamw.eps, fused=True)


def torch_trainer(
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor, Tensor, bool], Tensor],
    clip: float = ADAMW.clip,
) -> Callable[[Sequence[Batch]], tuple[float, Any]]:
    """A plain training step: micro-batches -> (loss, gradient norm before clipping).

    `loss_of(tokens, labels, is_last)` is the share of a micro-batch in the loss of the step.
    """

    def train(batches: Sequence[Batch]) -> tuple[float, Any]:
        total = torch.zeros(())
        for micro, (tokens, labels) in enumerate(batches):
            loss = loss_of(tokens, labels, micro == len(batches) - 1)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total.item(), norm

    return train


def alternate(steps: Mapping[str, Step], rounds: int, warmup: int, before: Callable[[], None]) -> dict[str, Timing]:
    """Let the contestants take turns; `before` runs, untimed, before every step."""
    timings = {name: Timing() for name in steps}
    gc.collect()
    gc.disable()  # a collection could fall into either contestant's step
    for number in range(warmup + rounds):
        names = list(steps)
        for name in names if number % 2 == 0 else reversed(names):
            before()
            faults, cpu, wall = num_faults(), time.process_time(), time.perf_counter()
            loss = steps[name](number)
            if number >= warmup:
                timings[name].wall_s.append(time.perf_counter() - wall)
                timings[name].cpu_s.append(time.process_time() - cpu)
                timings[name].faults.append(num_faults() - faults)
            timings[name].losses.append(loss)
    gc.enable()
    return timings


def num_faults() -> int:
    """The minor page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def free_port() -> int:
    """A port that is free now, below those that the system gives to whoever asks for any port."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def loss_difference(first: Timing, second: Timing) -> float:
    """The largest difference of two contestants' losses of the same step."""
    return max(abs(a - b) for a, b in zip(first.losses, second.losses, strict=True))


def norm_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """The largest relative difference of two contestants' gradient norms of the same step."""
    return max(abs(a - b) / max(a, b) for a, b in zip(first, second, strict=True))


def over_ranks(timing: Timing) -> Timing:
    """The wall time of the slowest rank, and processor time and faults of all. Every rank calls this."""
    wall, cpu = torch.tensor(timing.wall_s), torch.tensor(timing.cpu_s)
    faults = torch.tensor(timing.faults)
    dist.all_reduce(wall, dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    dist.all_reduce(faults)
    return Timing(wall.tolist(), cpu.tolist(), timing.losses, faults.tolist())


def bench_parser(doc: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Parser of a benchmark: the options for claims, and `numbers` as options with these defaults."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=_HELP.get(name))
    options_for_claims(parser)
    return parser
