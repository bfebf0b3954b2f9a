"""Two libraries that take turns, each in processes of its own: the engine changes the malloc settings of its process.

They step one after the other, and the waiting one sits at a barrier. A step takes as long as its slowest rank.
"""

import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from bench.claims import ratio_words
from bench.common import ADAMW, Batch, Step, Timing, free_port, loss_difference, norm_difference
from terrace.runtime.batch import Batch as MicroBatch
from terrace.runtime.engine import Engine

GOAL = 1.0  # of torch's time
LIBRARIES = ("torch", "engine")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
_LIMITS = {"fp32": 1e-3, "fp64": 1e-10}  # largest difference of losses, and relative difference of norms

Train = Callable[[Sequence[Batch]], tuple[float, float]]  # micro-batches of a step -> mean loss, gradient norm


@dataclass
class Result:
    """Figures of one contestant on one rank, or over all of them."""

    timing: Timing
    norms: list[float] = field(default_factory=list)


def step_of(train: Train, batches: Callable[[int], list[Batch]], result: Result) -> Step:
    """A step that keeps its gradient norm in `result`."""

    def step(number: int) -> float:
        loss, norm = train(batches(number))
        result.norms.append(norm)
        return loss

    return step


def sit_out(number: int) -> float:
    """The step of a library that lives in other processes."""
    return 0.0


def engine_train(engine: Engine) -> Train:
    """The engine's step."""

    def train(batches: Sequence[Batch]) -> tuple[float, float]:
        result = engine.step([MicroBatch(*batch) for batch in batches], ADAMW.lr)
        engine.drain()  # torch's step leaves nothing running either
        return result.loss, result.grad_norm

    return train


def time_cells(timing: Timing) -> list[str]:
    """Median and least seconds of a step, and its median processor seconds."""
    wall_s = timing.wall_s
    return [f"{statistics.median(wall_s):.3f}", f"{min(wall_s):.3f}", f"{statistics.median(timing.cpu_s):.2f}"]


def difference_cells(ours: Result, theirs: Result) -> list[str]:
    """Largest differences of losses and of gradient norms."""
    return [f"{loss_difference(ours.timing, theirs.timing):.0e}", f"{norm_difference(ours.norms, theirs.norms):.0e}"]


def ratio_cell(ours: Result, theirs: Result) -> str:
    return ratio_words(ours.timing.wall_s, theirs.timing.wall_s)


def differences(name: str, ours: Result, theirs: Result, dtype: str) -> list[str]:
    """Faults in the numbers of two contestants: losses or gradient norms that differ."""
    difference = max(loss_difference(ours.timing, theirs.timing), norm_difference(ours.norms, theirs.norms))
    return [f"{name}: losses or norms differ by {difference:.0e}"] if difference > _LIMITS[dtype] else []


def mean_over_ranks(values: Sequence[float]) -> list[float]:
    """The mean of each value. Every rank calls this."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total / dist.get_world_size()]


def hold(contest: Callable[..., dict[str, Any]], libraries: Sequence[str], num_ranks: int, *job: Any) -> dict[str, Any]:
    """Results of `contest(rank, num_ranks, *job, libraries, turn)`, each library in processes of its own."""
    context = multiprocessing.get_context("spawn")
    num_processes, found = num_ranks * len(libraries), context.SimpleQueue()
    ports = [free_port() for _ in libraries]
    arguments = (contest, libraries, num_ranks, job, ports, context.Barrier(num_processes), found)
    spawn(_work, arguments, nprocs=num_processes)  # type: ignore[no-untyped-call]
    results: dict[str, Any] = {}
    for _ in libraries:
        results |= found.get()
    return results


def _work(
    index: int,
    contest: Callable[..., dict[str, Any]],
    libraries: Sequence[str],
    num_ranks: int,
    job: Sequence[Any],
    ports: Sequence[int],
    turns: Any,
    found: Any,
) -> None:
    # One process: a rank of one of the libraries. The first rank of each leaves its results in `found`.
    place, rank = divmod(index, num_ranks)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{ports[place]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    results = contest(rank, num_ranks, *job, libraries[place : place + 1], turns.wait)
    if rank == 0:
        found.put(results)
    dist.barrier()
    dist.destroy_process_group()
