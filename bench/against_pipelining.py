"""Four and eight gloo ranks on one machine: the engine's pipelines against `torch.distributed.pipelining`.

    1f1b          one stage per rank
    interleaved   two chunks per rank, one after the other round the ranks
    zbv           two chunks per rank, down the ranks and up again, input and weight gradients apart
    data          1f1b over half of the ranks, twice: stages are replicated        DistributedDataParallel in torch
    zero3         the same, model state of a stage placed by the planner           FSDP2 in torch, whole during a step
    gathered      the same, all of it sharded, gathered for each micro-batch       the same

The same decoder, cut in the same places, the same initial values and batches, fp32, the same AdamW and clipping. Each
library has its own processes for each row. They take turns step by step, and the waiting one sits at a barrier. A step
takes as long as its slowest rank, and ends when all of its work is done.

Peak memory is the growth of a rank's resident memory since before the model was made, at the peak of one more step
after the timed ones: memory kept by the allocator counts, in both. `kept` is the memory of parameters and gradients:
for torch the most at one time, tensor by tensor; for the engine the sum of the peaks of its categories of them (whole
and sharded). Both columns give the largest rank, and the mean over ranks.

Targets: the engine is at least as fast as torch under the same schedule, with the same losses and gradient norms; under
zero3 at most 1.1 of torch's time, and under both of the last no rank's peak above torch's largest.
"""

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from bench import turns
from bench.claims import Claim, compared, judge, print_table, versioned
from bench.common import (
    Batch,
    Step,
    Timing,
    alternate,
    bench_parser,
    decoder,
    engine_of,
    local_cluster,
    micro_batches,
    over_ranks,
    real_blocks,
)
from bench.lab import counters
from bench.torch_pipelining import Pipeline, Trainer
from bench.turns import DTYPES, LIBRARIES, Train
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.comm.exchange import gather_plain
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import ModelConfig
from terrace.model.decoder import build_blocks
from terrace.model.init import initial_value
from terrace.plan.presets import preset
from terrace.planner.pins import parse_pins
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.program.schedules.registry import schedule_names
from terrace.runtime.engine import Engine

KEPT = ("params", "secondary", "gathered", "grads", "grads_full")  # of the engine's categories of memory
SHARDED_GOAL = 1.1  # of torch's time, with less memory
_BOUND = "a block's Python around each instruction, where products are small"
HEADER = ["ranks", "case", "who", "rounds", "median s", "min s", "CPU s", "peak MB (mean)", "kept MB (mean)"]
HEADER += ["engine / torch (quartiles)", "loss diff", "norm diff", "target"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A schedule and its data axis."""

    schedule: str
    num_chunks: int = 1  # virtual stages a rank
    num_data_ranks: int = 1
    sharded: bool = False  # over the data ranks
    planned: bool = False  # the engine's placements are the planner's


CASES = {
    "1f1b": Case(schedule="1f1b"),
    "interleaved": Case(schedule="interleaved", num_chunks=2),
    "zbv": Case(schedule="zbv", num_chunks=2),
    "data": Case(schedule="1f1b", num_data_ranks=2),
    "zero3": Case(schedule="1f1b", num_data_ranks=2, sharded=True, planned=True),
    "gathered": Case(schedule="1f1b", num_data_ranks=2, sharded=True),
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
class Result(turns.Result):
    """Figures of one contestant over all ranks."""

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
    placed = planned(job, case, cluster) if case.planned else dict.fromkeys(("params", "grads", "optimizer"), where)
    changes: dict[str, Any] = {
        **placed,
        "mapping": mapping,
        "schedule": case.schedule if case.num_chunks == 1 else f"{case.schedule}:{case.num_chunks}",
        "stages": pipeline.stages,
        "micro_batch": job.batch,
        "compute": job.dtype,
        "master": job.dtype,
        "wire": {},
    }
    engine = engine_of(
        build_blocks(config),
        cluster,
        replace(preset("ddp", cluster), **changes),
        job.micros,
        rank=rank,
        initial=lambda block, name, shape: initial_value(config, block, name, shape, 0),
        declared=block_specs(config),
        sequence=job.sequence,
    )
    train = turns.engine_train(engine)
    return Contestant(train=train, kept_bytes=partial(_metered, engine), finish=partial(_end, engine))


def planned(job: Job, case: Case, cluster: Cluster) -> dict[str, str]:
    """Where the planner places the states of a case on tiers like the ones of preset `local`, with all else given."""
    local = load_cluster("local")
    links = [replace(local.tiers[0], name=tier.name, size=tier.size) for tier in cluster.tiers]
    cluster = replace(local, tiers=tuple(links))
    num_stages, batch = cluster.world_size // case.num_data_ranks, job.micros * job.batch * case.num_data_ranks
    task = Task(model=job.model, cluster=cluster, batch=batch, sequence=job.sequence, compute="fp32", master="fp32")
    pins = [f"pipeline={num_stages}", f"micro_batch={job.batch}", "recompute=none", f"schedule={case.schedule}"]
    space = Space(task=task, axes=("data", "pipeline"), pins=parse_pins(pins, cluster, schedule_names()))
    found, _ = find(space, count=1)
    plan = plan_of(task, found.best[0].candidate)
    assert plan.mapping == {"node": {"pipeline": num_stages}}, "data ranks are inside the package"
    return {"params": plan.params, "grads": plan.grads, "optimizer": plan.optimizer}


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
    steps: dict[str, Step] = dict.fromkeys(job.libraries, turns.sit_out)
    results = {library: Result(Timing()) for library in made}
    for library, contestant in made.items():
        batches_of = partial(job.batches, data_rank=data_rank)
        steps[library] = turns.step_of(contestant.train, batches_of, results[library])
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


def _everyone(figure: int) -> list[int]:
    return gather_plain(figure, torch.device("cpu"))


def verdict(num_ranks: int, job: Job, name: str, results: dict[str, Result]) -> tuple[list[Claim], list[str]]:
    """Claims of case `name` about time, and memory where it counts, and the faults of its numbers."""
    ours, theirs = results["engine"], results["torch"]
    text, rival = f"pipeline of {num_ranks} ranks, {name}, hidden {job.hidden}", versioned("torch", "pipelining")
    case, goal = CASES[name], SHARDED_GOAL if CASES[name].sharded else turns.GOAL
    claims = []
    # What is gathered for each micro-batch takes less memory, not less time.
    if case.planned or not case.sharded:
        claims.append(compared(text, ours.timing.wall_s, theirs.timing.wall_s, goal, rival=rival, bound=_BOUND))
    if case.sharded:
        peaks = [max(ours.peak_bytes)], [max(theirs.peak_bytes)]
        claims.append(compared(f"{text}: largest peak of a rank", *peaks, 1.0, rival=rival))
    return claims, turns.differences(text, ours, theirs, job.dtype)


def rows(num_ranks: int, job: Job, name: str, results: dict[str, Result]) -> list[list[str]]:
    """Rows of the table for case `name`."""
    found = []
    for library, result in results.items():
        row = [str(num_ranks), name, library, str(job.rounds), *turns.time_cells(result.timing)]
        for figures in (result.peak_bytes, result.kept_bytes):
            row += [f"{max(figures) / 1e6:.1f} ({statistics.mean(figures) / 1e6:.1f})"]
        if library == "engine" and "torch" in results:
            other = results["torch"]
            row += [turns.ratio_cell(result, other), *turns.difference_cells(result, other)]
            claims, wrong = verdict(num_ranks, job, name, results)
            row += ["met" if not wrong and all(claim.is_met for claim in claims) else "missed"]
        found.append(row + [""] * (len(HEADER) - len(row)))
    return found


def main() -> int:
    """Print a table; return 1 when --check is given and a target is missed."""
    defaults = Job()
    names = ("hidden", "layers", "vocab", "batch", "sequence", "micros", "rounds")
    parser = bench_parser(__doc__, **{name: getattr(defaults, name) for name in names})
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--dtype", choices=DTYPES, default=defaults.dtype)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    given = {key: value for key, value in vars(options).items() if key not in ("check", "claims", "ranks", "only")}
    job = Job(**given)
    tokens = f"{job.micros} micro-batches of {job.batch} x {job.sequence} tokens"
    print(f"{num_params(job.model) / 1e6:.2f} M parameters, {tokens}, {job.dtype}\n")
    table: list[list[str]] = []
    claims: list[Claim] = []
    wrong: list[str] = []
    for num_ranks in options.ranks:
        for name in options.only:
            found = turns.hold(contest, job.libraries, num_ranks, job, name)
            results = {library: found[library] for library in job.libraries}
            table += rows(num_ranks, job, name, results)
            more, faults = verdict(num_ranks, job, name, results)
            claims += more
            wrong += faults
    print_table(HEADER, table)
    return judge(claims, options, wrong)


if __name__ == "__main__":
    sys.exit(main())
