"""Shared by the benchmarks: the model, its batches, alternating timing, tables.

Machines that run these are seldom idle, so absolute times mean little. The contestants take turns in the same process,
the order flips every round, and the result is the median over rounds of the ratio within a round.
"""

import gc
import resource
import socket
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import IGNORE_INDEX, build_blocks
from terrace.model.init import initialise
from terrace.runtime.settings import OptimizerConfig

ADAMW = OptimizerConfig(lr=1e-3)

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
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "intermediate_size": -(-8 * hidden // 3 // 32) * 32,
            "tie_word_embeddings": tied,
        }
    )


def real_blocks(config: ModelConfig, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """The blocks of `config` with the values of seed 0, on the CPU."""
    blocks = build_blocks(config)
    initialise(blocks, config, seed=0, dtype=dtype)
    return blocks


def block_names(blocks: Sequence[nn.Module]) -> list[str]:
    """The names that patterns of a plan match."""
    return ["embedding", *(f"layers.{index}" for index in range(len(blocks) - 2)), "head"]


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
    device = Device(name="cpu", memory_bytes=1e12, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"fp32": 1e10})
    tier = Tier(name="any", size=1, bandwidth_bytes_per_s=1e9, latency_s=1e-5)
    return Cluster(
        name="bench", device=device, tiers=tuple(replace(tier, name=name, size=size) for name, size in sizes.items())
    )


def decay_groups(parameters: Sequence[nn.Parameter]) -> list[dict[str, object]]:
    """The two parameter groups of AdamW: matrices decay, norms do not."""
    return [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": ADAMW.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


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
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def spread(numerator: Sequence[float], denominator: Sequence[float]) -> tuple[float, float]:
    """The first and the third quartile of the ratio within a round."""
    low, _, high = statistics.quantiles([a / b for a, b in zip(numerator, denominator, strict=True)], n=4)
    return low, high


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


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table in Markdown, so that it can go into the README as it is."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    for row in (header, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)
