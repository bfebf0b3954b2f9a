"""A rank of a run before its first step: engine, data and restored state."""

import time
from datetime import timedelta

import torch
from torch import Tensor

from terrace.accelerator import has_streams
from terrace.base.errors import ConfigError
from terrace.base.schema import dump, load
from terrace.checkpoint.peer_copies import gather_files
from terrace.checkpoint.reading import Checkpoint, resume
from terrace.cluster.cluster import Cluster
from terrace.comm.groups import Timeouts
from terrace.comm.pace import pace_of
from terrace.comm.process_group import rank_device
from terrace.data.batches import Batches
from terrace.data.eval_batches import EvalBatches
from terrace.launch.start import pace
from terrace.launch.watchdog import Watchdog
from terrace.launch.world import World
from terrace.model.balance import BalanceConfig
from terrace.model.facts import vocabulary_size
from terrace.model.hf.pretrained import Pretrained
from terrace.model.init import initial_value
from terrace.model.lora.config import is_adapter
from terrace.plan.context import is_context_parallel
from terrace.plan.members import boundary_formats
from terrace.runtime.engine import Engine
from terrace.runtime.messages import Progress
from terrace.runtime.objective import Objective
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.sequence.cost import WorkCost
from terrace.train.adapted import run_blocks_of
from terrace.train.context_batches import ContextBatches
from terrace.train.deals import Deals
from terrace.train.distilled import learning_of
from terrace.train.facts import kept_cost, work_cost
from terrace.train.injected import Faults, faults_of
from terrace.train.job import RunJob
from terrace.train.metrics import Observer
from terrace.train.micro_batches import MicroBatches
from terrace.train.patience import APART, Patience


class Reporter:
    """Reports to the watchdog the current instruction of step `step`, or of the evaluation after it."""

    def __init__(self, dog: Watchdog, faults: Faults, *, compiles: bool) -> None:
        self._dog, self.patience, self.faults = dog, Patience(), faults
        self.at: Progress = faults.watched(self._at, lambda: self.step)
        self.step = 0
        self.num_before = 0  # instructions of the step and of evaluations behind it, before those that run
        self.is_compiling = compiles  # which may take minutes, so that a watchdog would take it for a hang

    def _at(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        if not self.is_compiling:
            extra_s = self.patience.seconds(self.step, instruction, waiting_on)
            self._dog.at(self.step, self.num_before + counter, instruction, waiting_on, extra_s)


class RankOfRun:
    """A rank's engine and data. Every rank calls the methods at the same points."""

    def __init__(self, world: World, job: RunJob, observer: Observer, dog: Watchdog) -> None:
        self.world, self.job, self.observer, self.dog = world, job, observer, dog
        self.run = run = job.run
        self.batches = Batches(
            job.sources, run.train.sequence, run.rows, run.train.seed, run.data.holdout, vocabulary_size(run.model)
        )
        self.deals = Deals(run.plan.shares, job.deals, boundary_formats(run.cluster, run.plan))
        self.learning = learning_of(run, self.batches)
        self.reporter = Reporter(dog, faults_of(world), compiles=bool(run.train.compile))
        self.engine = _engine(job, world.rank, self.learning.objective, self.reporter.at)
        for words in filter(None, (self.reporter.faults.words, self.engine.below.words)):
            observer.note(words)
        if self.run.plan.outer.has_islands:
            dog.name_island(self.engine.island.numbers.island)
            self.reporter.patience.follow(self.engine.island, waits_anywhere=has_streams(self.engine.device))

    def resume(self) -> int:
        """Restores the checkpoint to resume from, on disk or in memory. Returns the number of steps done, 0 without
        one.

        Raises `CheckpointError`.
        """
        if self.job.resume is None:
            return 0
        # Reading takes as long as the disk needs, so no timeout runs.
        self.dog.idle("loading the checkpoint")
        checkpoint, begin_s = Checkpoint(self.job.resume), time.perf_counter()
        if self.job.memory:
            num_bytes = gather_files(self.engine.state, checkpoint, self.world, self.engine.comm.exchange)
            self.observer.note(
                f"step {checkpoint.step} comes from memory: {num_bytes / 1e6:.3g} MB went to machines without them, in "
                f"{time.perf_counter() - begin_s:.2g} s"
            )
        if said := resume(self.engine, checkpoint):
            self.observer.note(said)
        return checkpoint.step

    def deal(self, step: int) -> bool:
        """Give the engine the shares or formats of step `step`, counted from 0. Returns whether it had others."""
        shares, formats, plan = self.deals.at(step), self.deals.formats_at(step), self.engine.program.plan
        if shares == plan.shares and formats == boundary_formats(self.run.cluster, plan):
            return False
        self.engine.deal(shares, formats)
        return True

    def close(self) -> None:
        """Stop the engine's lanes, and what runs beside it."""
        self.learning.close()
        self.engine.close()

    def cost(self, cluster: Cluster) -> WorkCost | None:
        """The attention cost by which context ranks divide documents: from the checkpoint if it has one, else on
        `cluster`. None without a context axis.
        """
        if not is_context_parallel(self.engine.program.mesh, self.run.plan):
            return None
        kept = None if self.job.resume is None else kept_cost(self.run, Checkpoint(self.job.resume).facts)
        # Rank 0's figures for all: ranks that measured different ones would assign documents differently.
        own = dump(kept or work_cost(self.run, cluster))
        return load(WorkCost, self.engine.comm.exchange(own)[0], "the cost of rank 0")

    def micro_batches(self, batches: Batches | EvalBatches, cost: WorkCost | None) -> MicroBatches:
        run, program, rank = self.run, self.engine.program, self.world.rank
        context = None
        if cost is not None:
            context = ContextBatches(batches, run.cluster, run.plan, program.num_micros, rank, cost)
        # Training batches are made ahead of their step, those of an evaluation within it.
        shares_at = self.deals.at if isinstance(batches, Batches) else lambda step: self.engine.program.plan.shares
        return MicroBatches(batches, program, rank, has_streams(self.engine.device), context, shares_at)


def _engine(job: RunJob, rank: int, objective: Objective, progress: Progress) -> Engine:
    run, rate, device = job.run, pace(), rank_device()
    if rate is not None and has_streams(device):
        raise ConfigError("TERRACE_PACE paces messages of CPU ranks only: unset it, or set CUDA_VISIBLE_DEVICES=''")
    # A resumed run takes its values from the checkpoint, so the starting weights are not read. The engine copies the
    # values, so the files are closed at the end.
    begins_with = run.train.weights if job.resume is None else ""
    pretrained = Pretrained(begins_with, run.model, adds_rows=True) if begins_with else None

    def initial(block: str, name: str, shape: tuple[int, ...]) -> Tensor:
        if job.resume is not None:
            return torch.zeros(1).expand(shape)  # the checkpoint has the values
        # A score that the folder of a causal model lacks begins as in a new model.
        if pretrained is not None and not is_adapter(name) and (block, name) in pretrained:
            return pretrained.value(block, name)
        return initial_value(run.model, block, name, shape, run.train.seed)

    return Engine(
        Blocks(
            run_blocks_of(run, device),
            names=[spec.name for spec in run.blocks()],
            declared=run.blocks(),
            freeze=run.train.freeze,
            initial=initial,
        ),
        Workload(
            cluster=run.cluster,
            plan=run.plan,
            num_micros=run.num_micros(),
            sequence=run.train.sequence,
            is_verified=True,  # by the process that prepared the job
        ),
        objective,
        Training(
            optimizer=run.optimizer,
            balance=run.balance or BalanceConfig(),
            pruning=run.prune,
            compiled=bool(run.train.compile),
            seed=run.train.seed,
        ),
        RankSetup(
            rank=rank,
            device=device,
            # Longer than the watchdog's, which names the culprit.
            timeout=Timeouts(timedelta(seconds=2 * run.train.timeout_s), APART),
            pacer=pace_of(run.cluster, rate),
            progress=progress,
            keep_folder=run.train.keep_folder or job.folder,
        ),
    )
