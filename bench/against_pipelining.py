"""Four and eight gloo ranks on one machine: the engine's pipelines against `torch.distributed.pipelining`.

    1f1b          one stage per rank
    interleaved   two chunks per rank, one after the other round the ranks
    zbv           two chunks per rank, down the ranks and up again, input and weight gradients apart
    data          1f1b over half of the ranks, twice: stages are replicated        DistributedDataParallel in torch
    zero3         the same, all model state of a stage sharded over the two        FSDP2 in torch

The same decoder, cut in the same places, the same initial values and batches, fp32, the same AdamW and clipping. Each
library has its own processes for each row. They take turns step by step, and the waiting one sits at a barrier. A step
takes as long as its slowest rank, and ends when all of its work is done.

Peak memory is the growth of a rank's resident memory since before the model was made, at the peak of one more step
after the timed ones: memory kept by the allocator counts, in both. `kept` is the memory of parameters and gradients:
for torch the most at one time, tensor by tensor; for the engine the sum of the peaks of its categories of them (whole
and sharded). Both columns give the largest rank, and the mean over ranks.

Targets: the engine is at least as fast as torch under the same schedule, with the same losses and gradient norms; and
under zero3 no rank's peak is above torch's largest.
"""

import argparse
import gc
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from bench.common import (
    ADAMW,
    Batch,
    Step,
    Timing,
    alternate,
    block_names,
    decoder,
    free_port,
    local_cluster,
    loss_difference,
    micro_batches,
    norm_difference,
    over_ranks,
    print_table,
    ratio,
    real_blocks,
    spread,
)
from bench.lab import counters
from bench.torch_pipelining import Pipeline, Train, Trainer
from terrace.model.config import ModelConfig, block_specs, num_params
from terrace.model.decoder import build_blocks, token_loss
from terrace.model.init import initial_value
from terrace.plan.presets import preset
from terrace.runtime.batch import Batch as MicroBatch
from terrace.runtime.engine import Engine

TARGET = 1.0
LIBRARIES = ("torch", "engine")
DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
LIMITS = {"fp32": 1e-3, "fp64": 1e-10}  # largest difference of losses, and relative difference of norms
KEPT = ("params", "secondary", "gathered", "grads", "grads_full")  # of the engine's categories of memory
HEADER = ["ranks", "case", "who", "rounds", "median s", "min s", "CPU s", "peak MB (mean)", "kept MB (mean)"]
HEADER += ["engine / torch (quartiles)", "loss diff", "norm diff", "target"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule and its data axis."""

    schedule: str
    num_chunks: int = 1  # virtual stages a rank
    num_data_ranks: int = 1
    sharded: bool = False  # over the data ranks


CASES = {
    "1f1b": Case(schedule="1f1b"),
    "interleaved": Case(schedule="interleaved", num_chunks=2),
    "zbv": Case(schedule="zbv", num_chunks=2),
    "data": Case(schedule="1f1b", num_data_ranks=2),
    "zero3": Case(schedule="1f1b", num_data_ranks=2, sharded=True),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """Settings given to every process."""

    hidden: int = 256
    layers: int = 14
    vocab: int = 1000
    batch: int = 1  # sequences of a micro-batch
    sequence: int = 128
    micros: int = 16
    rounds: int = 8
    dtype: str = "fp32"
    libraries: tuple[str, ...] = LIBRARIES

    @property
    def model(self) -> ModelConfig:
        return decoder(self.hidden, self.layers, self.vocab)

    def batches(self, step: int, data_rank: int) -> list[Batch]:
        """The micro-batches of a step, the same for all stages."""
        return micro_batches(step, data_rank, self.micros, (self.batch, self.sequence), self.vocab)


@dataclass
class Result:
    """Figures of one contestant over all ranks."""

    timing: Timing
    norms: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)  # of every rank
    kept_bytes: list[int] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A library at work on this rank."""

    train: Train
    kept_bytes: Callable[[Sequence[Batch]], int]
    finish: Callable[[], None]


def pipeline_for(job: Job, num_ranks: int, case: Case) -> Pipeline:
    """The stages of `case` on `num_ranks` ranks: equally many blocks in each, or one more in the first ones."""
    num_stage_ranks, rest = divmod(num_ranks, case.num_data_ranks)
    assert rest == 0, f"{num_ranks} ranks are not {case.num_data_ranks} data ranks a stage"
    num_stages, num_blocks = num_stage_ranks * case.num_chunks, job.layers + 2
    assert num_blocks >= num_stages, f"{num_blocks} blocks for {num_stages} stages: ask for more --layers"
    each, more = divmod(num_blocks, num_stages)
    return Pipeline(
        schedule=case.schedule,
        stages=tuple(each + (stage < more) for stage in range(num_stages)),
        num_stage_ranks=num_stage_ranks,
        num_data_ranks=case.num_data_ranks,
        sharded=case.sharded,
    )


def torch_for(job: Job, rank: int, num_ranks: int, case: Case) -> Contestant:
    """Torch's pipeline."""
    trainer = Trainer(real_blocks(job.model, DTYPES[job.dtype]), pipeline_for(job, num_ranks, case), job.micros)
    return Contestant(train=trainer.step, kept_bytes=trainer.kept_bytes, finish=lambda: None)


def engine_for(job: Job, rank: int, num_ranks: int, case: Case) -> Contestant:
    """The engine's pipeline; its data ranks are inside the package, its stages outside."""
    config, pipeline = job.model, pipeline_for(job, num_ranks, case)
    if case.num_data_ranks == 1:
        cluster = local_cluster({"package": num_ranks})
        mapping = {"package": {"pipeline": num_ranks}}
    else:
        cluster = local_cluster({"package": case.num_data_ranks, "node": pipeline.num_stage_ranks})
        mapping = {"package": {"data": case.num_data_ranks}, "node": {"pipeline": pipeline.num_stage_ranks}}
    where = "package" if case.sharded else "device"
    changes: dict[str, Any] = {
        "params": where,
        "grads": where,
        "optimizer": where,
        "mapping": mapping,
        "schedule": case.schedule if case.num_chunks == 1 else f"{case.schedule}:{case.num_chunks}",
        "stages": pipeline.stages,
        "micro_batch": job.batch,
        "compute": job.dtype,
        "master": job.dtype,
        "wire": {},
    }
    blocks = build_blocks(config)
    engine = Engine(
        blocks,
        names=block_names(blocks),
        cluster=cluster,
        plan=replace(preset("ddp", cluster), **changes),
        num_micros=job.micros,
        objective=token_loss,
        rank=rank,
        optimizer=ADAMW,
        initial=lambda block, name, shape: initial_value(config, block, name, shape, 0),
        timeout=timedelta(seconds=120),
        declared=block_specs(config),
        sequence=job.sequence,
    )
    return Contestant(
        train=partial(_figures, engine), kept_bytes=partial(_metered, engine), finish=partial(_end, engine)
    )


def _figures(engine: Engine, batches: Sequence[Batch]) -> tuple[float, float]:
    result = engine.step([MicroBatch(*batch) for batch in batches], ADAMW.lr)
    engine.drain()  # torch's step leaves nothing running either
    return result.loss, result.grad_norm


def _metered(engine: Engine, batches: Sequence[Batch]) -> int:
    memory = engine.report({}).memory_bytes
    return sum(memory.get(category, 0) for category in KEPT)


def _end(engine: Engine) -> None:
    engine.check_bytes()
    engine.close()


MAKERS = {"torch": torch_for, "engine": engine_for}


def contest(
    rank: int, num_ranks: int, job: Job, name: str, libraries: Sequence[str], turn: Callable[[], None]
) -> dict[str, Result]:
    """Let the libraries of `job` take turns at case `name`; figures over all ranks of those in `libraries`.

    The others live in other processes: this one waits during their steps. `turn` returns when every process has called
    it. Raises `ProgramError` when the engine sent other bytes than its plan declares.
    """
    case = CASES[name]
    data_rank = rank % case.num_data_ranks
    _load_optimizer()
    counters.trim()
    before = counters.resident_bytes()
    made = {library: MAKERS[library](job, rank, num_ranks, case) for library in job.libraries if library in libraries}
    counters.trim()  # memory used to build it does not count
    steps: dict[str, Step] = dict.fromkeys(job.libraries, _sit_out)
    results = {library: Result(Timing()) for library in made}
    for library, contestant in made.items():
        steps[library] = partial(_step, job, data_rank, contestant, results[library])
    timings = alternate(steps, job.rounds, warmup=2, before=turn)
    for library in job.libraries:
        turn()
        if library not in made:
            continue
        contestant, result = made[library], results[library]
        result.timing = over_ranks(timings[library])
        batches = job.batches(0, data_rank)
        gc.collect()
        counters.forget_peak()
        contestant.train(batches)
        result.peak_bytes = _everyone(counters.peak_resident_bytes() - before)
        result.kept_bytes = _everyone(contestant.kept_bytes(batches))
        contestant.finish()
    return results


def _load_optimizer() -> None:
    # The first optimizer of a process imports much of torch, which is no memory of a model.
    torch.optim.AdamW([nn.Parameter(torch.zeros(2, 2))], fused=True)


def _sit_out(number: int) -> float:
    return 0.0


def _step(job: Job, data_rank: int, contestant: Contestant, result: Result, number: int) -> float:
    loss, norm = contestant.train(job.batches(number, data_rank))
    result.norms.append(norm)
    return loss


def _everyone(figure: int) -> list[int]:
    figures: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(figures, figure)
    return figures


def verdict(job: Job, name: str, results: dict[str, Result]) -> list[str]:
    """Targets that the engine missed in case `name`."""
    ours, theirs, missed = results["engine"], results["torch"], []
    found = ratio(ours.timing.wall_s, theirs.timing.wall_s)
    if found > TARGET:
        missed.append(f"{name}: {found:.3f} of torch's time")
    if CASES[name].sharded and max(ours.peak_bytes) > max(theirs.peak_bytes):
        missed.append(f"{name}: {max(ours.peak_bytes) / max(theirs.peak_bytes):.3f} of torch's memory")
    difference = max(loss_difference(ours.timing, theirs.timing), norm_difference(ours.norms, theirs.norms))
    if difference > LIMITS[job.dtype]:
        missed.append(f"{name}: losses or norms differ by {difference:.0e}")
    return missed


def rows(num_ranks: int, job: Job, name: str, results: dict[str, Result]) -> list[list[str]]:
    """Rows of the table for case `name`."""
    found = []
    for library, result in results.items():
        timing = result.timing
        row = [str(num_ranks), name, library, str(job.rounds)]
        row += [f"{statistics.median(timing.wall_s):.3f}", f"{min(timing.wall_s):.3f}"]
        row += [f"{statistics.median(timing.cpu_s):.2f}"]
        for figures in (result.peak_bytes, result.kept_bytes):
            row += [f"{max(figures) / 1e6:.1f} ({statistics.mean(figures) / 1e6:.1f})"]
        if library == "engine" and "torch" in results:
            other = results["torch"]
            low, high = spread(timing.wall_s, other.timing.wall_s)
            row += [f"{ratio(timing.wall_s, other.timing.wall_s):.3f} ({low:.3f} - {high:.3f})"]
            row += [f"{loss_difference(timing, other.timing):.0e}", f"{norm_difference(result.norms, other.norms):.0e}"]
            row += ["missed" if verdict(job, name, results) else "met"]
        found.append(row + [""] * (len(HEADER) - len(row)))
    return found


def work(index: int, num_ranks: int, job: Job, name: str, ports: Sequence[int], turns: Any, found: Any) -> None:
    """One process: a rank of one of the libraries. The first rank of each leaves its results in `found`."""
    place, rank = divmod(index, num_ranks)
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{ports[place]}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    results = contest(rank, num_ranks, job, name, job.libraries[place : place + 1], turns.wait)
    if rank == 0:
        found.put(results)
    dist.barrier()
    dist.destroy_process_group()


def hold(num_ranks: int, job: Job, name: str) -> dict[str, Result]:
    """Run one case in processes of its own."""
    context = multiprocessing.get_context("spawn")
    num_processes, found = num_ranks * len(job.libraries), context.SimpleQueue()
    ports = [free_port() for _ in job.libraries]
    spawn(  # type: ignore[no-untyped-call]
        work, (num_ranks, job, name, ports, context.Barrier(num_processes), found), nprocs=num_processes
    )
    results: dict[str, Result] = {}
    for _ in job.libraries:
        results |= found.get()
    return {library: results[library] for library in job.libraries}


def main() -> int:
    """Print a table; return 1 when --check is given and a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    defaults = Job()
    for name in ("hidden", "layers", "vocab", "batch", "sequence", "micros", "rounds"):
        parser.add_argument(f"--{name}", type=int, default=getattr(defaults, name))
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--check", action="store_true", help="exit 1 when a target is missed")
    options = vars(parser.parse_args())
    check, ranks, names = options.pop("check"), options.pop("ranks"), options.pop("only")
    job = Job(**options)
    tokens = f"{job.micros} micro-batches of {job.batch} x {job.sequence} tokens"
    print(f"{num_params(job.model) / 1e6:.2f} M parameters, {tokens}, {job.dtype}\n")
    table, missed = [], []
    for num_ranks in ranks:
        for name in names:
            results = hold(num_ranks, job, name)
            table += rows(num_ranks, job, name, results)
            missed += [f"{num_ranks} ranks, {line}" for line in verdict(job, name, results)]
    print_table(HEADER, table)
    print("\nmet" if not missed else "\nMISSED: " + "; ".join(missed))
    return 1 if check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
