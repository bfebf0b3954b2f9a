"""Runs the steps of one rank, with the saves, evaluations, copies and metrics that follow each step."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from shlex import quote
from typing import TYPE_CHECKING

from terrace.base.errors import CheckpointError, TrainingError
from terrace.checkpoint.saved import Saved
from terrace.checkpoint.saving import Saver
from terrace.data.feeding import Feeder
from terrace.launch.postmortem import in_words
from terrace.launch.slow import in_lines
from terrace.launch.stop import Stop, Vote, begin_steps
from terrace.launch.watchdog import Watchdog
from terrace.launch.world import World
from terrace.program.program import Program
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.step_sums import StepResult
from terrace.sequence.cost import WorkCost
from terrace.train.adapted import attention_words
from terrace.train.copies import NoCopies
from terrace.train.facts import facts_of
from terrace.train.gauges import Gauges
from terrace.train.job import RunJob
from terrace.train.keys import Guards
from terrace.train.metrics import (
    NUM_SAVES,
    MetricsFile,
    Observer,
    StepRecord,
    Summary,
    outer_figures,
    outer_words,
    own_seconds,
)
from terrace.train.micro_batches import StepBatches
from terrace.train.profiler import Profiler
from terrace.train.schedule import learning_rate
from terrace.train.validation import Validation

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun

_PATIENCE = 10  # timeouts that rank 0 waits for files of others


class Saves:
    """Saves checkpoints. Every rank calls the methods at the same points. `newest` holds the last `NUM_SAVES` complete
    ones.
    """

    def __init__(
        self, engine: Engine, world: World, job: RunJob, cost: WorkCost | None, dog: Watchdog, observer: Observer
    ) -> None:
        train = job.run.train
        self._engine, self._dog, self._observer, self.newest = engine, dog, observer, tuple[Saved, ...]()
        self._saver = Saver(
            engine,
            world,
            job.folder,
            facts_of(job, cost),
            train.keep_checkpoints,
            background=train.background_save,
            limit_s=_PATIENCE * train.timeout_s,
        )
        beside = "is written beside the steps" if train.background_save else "is waited for"
        # Checkpoints are copied to main memory first, which the user must have room for.
        staged_mb = self._saver.staging_bytes / 1e6
        self.words = f"a checkpoint takes {staged_mb:.3g} MB of this rank's main memory while it {beside}"

    @property
    def problem(self) -> str | None:
        """Error of the last save once it is known, the same on every rank."""
        return self._saver.problem

    def save(self, step: int, best: int | None = None) -> None:
        """Starts a checkpoint after `step` steps. The one after step `best` is kept, however old it is."""
        self._dog.idle("saving a checkpoint")
        if self._saver.is_under_way:
            self._observer.note(f"step {step}: waiting for the checkpoint before, which is still being written")
        self._saver.start(step, best)
        self.tell()
        self._engine.check_bytes()

    def finish(self) -> None:
        """Waits for a running save. Raises `CheckpointError` on every rank if any rank could not write."""
        self._dog.idle("finishing a checkpoint")
        self._saver.finish()
        self.tell()

    def tell(self) -> None:
        """Passes finished background saves on to the observer."""
        while (saved := self._saver.news()) is not None:
            self.newest = (*self.newest, saved)[-NUM_SAVES:]
            self._observer.saved(saved.folder)

    def close(self) -> None:
        """Waits for a running save, and until the other ranks know its outcome."""
        self._saver.close()


class SlowRanks:
    """Reports each step to the watchdog, and to the observer the ranks that have become slow or fast again
    (terrace.launch.slow).
    """

    def __init__(self, dog: Watchdog, program: Program, train: Guards, observer: Observer) -> None:
        self._dog, self._train, self._observer = dog, train, observer
        self._known = frozenset[int]()
        ranks, mesh = range(program.cluster.world_size), program.mesh
        # Ranks of one stage compute the same.
        peers = [[rank for rank in ranks if mesh.stage(rank) == each] for each in range(program.stage.num_stages)]
        if train.slow_factor:
            dog.look_for_slow(peers, train.slow_factor, train.slow_steps)

    @property
    def factors(self) -> dict[str, float]:
        """Slow rank -> its own time over that of its fast peers, or of the first steps. Empty on ranks other than 0."""
        return {str(each.rank): round(each.factor, 2) for each in self._dog.lookout.slow}

    @property
    def slowest(self) -> dict[str, float]:
        """The `rank` with the most own work in the last steps, and its seconds `own_s`. Empty on ranks other than 0."""
        found = self._dog.lookout.slowest
        return {} if found is None else {"rank": found[0], "own_s": found[1]}

    def stepped(self, result: StepResult, data_s: float, step_s: float) -> None:
        self._dog.stepped(data_s + own_seconds(result.time_s), step_s)
        slow = self._dog.lookout.slow
        for line in in_lines([each for each in slow if each.rank not in self._known], self._train.slow_steps):
            self._observer.note(line)
        ranks = frozenset(each.rank for each in slow)
        if again := self._known - ranks:
            self._observer.note(f"no longer slow: {in_words(again)}")
        self._known = ranks


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Runs the steps of a rank, with all that follows each of them. Every rank calls `run` at the same point."""

    rank: "RankOfRun"
    vote: Vote
    saves: Saves
    validation: Validation
    copies: NoCopies
    gauges: Gauges
    slow: SlowRanks
    profiler: Profiler

    def run(self, first_step: int, feeder: Feeder[StepBatches]) -> tuple[Summary, Stop | None]:
        """Runs all steps from `first_step` on, or up to a stop that all ranks agree on."""
        rank, train, outer = self.rank, self.rank.run.train, self.rank.run.plan.outer
        summary = Summary(train.steps - first_step, outer.every)
        metrics = MetricsFile(rank.job.folder / "metrics.jsonl", first_step) if rank.world.rank == 0 else None
        if metrics is not None and metrics.num_lost:
            rank.observer.note(f"metrics.jsonl lacks {metrics.num_lost} of the first {first_step} steps")
        stop = None
        rank.dog.begin()
        if rank.world.rank == 0:
            begin_steps(rank.world)
        if self.validation.words:
            rank.observer.note(self.validation.words)
        for words in filter(None, (self.saves.words, attention_words(rank.run, rank.engine.device))):
            rank.observer.detail(words)
        if rank.job.resume is None:
            self.saves.save(0)  # a folder that cannot be written ends the run in its first minute
        # The time left is estimated without the first checkpoint.
        begin = time.perf_counter()
        for step in range(first_step, train.steps):
            rank.reporter.step = step
            started = time.perf_counter()
            rate = learning_rate(step, train, rank.run.optimizer)
            batches = self._next_batches(feeder)
            data_s = time.perf_counter() - started
            if rank.reporter.is_compiling:
                rank.dog.idle("compiling the blocks, in its first step")
            with self._saved_first(), self.profiler.around(step):
                result, problem = self._try(batches.micros, rate)
            self.copies.after(step + 1, is_finite=problem is None)
            rank.reporter.is_compiling = False
            record = self._record(step, result, rate, batches, data_s, time.perf_counter() - started)
            self.slow.stepped(result, data_s, record.step_s)
            summary.add(record)
            num_done = step + 1
            if num_done == train.steps and problem is None:
                self._finish(summary)
            if self.validation.is_due(num_done) and problem is None:
                record = replace(record, eval=self._evaluated(num_done))
            if metrics is not None:
                metrics.write(record)
            done = step + 1 - first_step
            per_step_s = (time.perf_counter() - begin) / done
            rank.observer.stepped(record, per_step_s * (train.steps - step - 1))
            self._check(num_done, result, problem)
            if step == first_step:
                rank.engine.check_bytes()  # a wrong byte count stops the run before it has cost anything
            stop = self._stop(num_done) if num_done < train.steps else None
            # A stop is voted on after every step but the last, and always leaves a checkpoint.
            due = train.checkpoint_every and num_done % train.checkpoint_every == 0
            if due or stop is not None or num_done == train.steps or self.validation.is_new_best:
                self.saves.save(num_done, self.validation.best_step)
                self.validation.is_new_best = False
            if stop is not None:
                break
        self.saves.finish()
        if self.validation.best_words:
            rank.observer.note(self.validation.best_words)
        if metrics is not None:
            metrics.close()
        return summary, stop

    def _try(self, micros: Sequence[Batch], rate: float) -> tuple[StepResult, NonFiniteError | None]:
        try:  # a step that was given up has figures, too, which are shown before the run ends
            return self.rank.engine.step(micros, rate), None
        except NonFiniteError as error:
            if error.result is None:
                raise
            return error.result, error

    def _check(self, number: int, result: StepResult, problem: NonFiniteError | None) -> None:
        with self._saved_first():
            if problem is not None:
                raise TrainingError(
                    f"step {number} has {problem}. The run cannot go on; to see the step block by block: "
                    f"terrace replay {quote(str(self.rank.job.folder))} --step {number}"
                ) from problem
            _check_rounding(result, number, self.rank.run.train.error_budget)
        if not result.num_tokens:
            self.rank.observer.note(f"step {number} has no label that counts: its gradient is zero")

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        try:
            yield
        # All ranks of an island raise this after the same step while others still write, so the save can finish.
        except TrainingError:
            self.saves.finish()
            self.copies.close()
            raise

    def _stop(self, num_done: int) -> Stop | None:
        self.saves.tell()
        # A rank that failed to save tells the others through the vote, so that all stop after the same step.
        if self.saves.problem is not None:
            self.vote.fail(self.saves.problem)
        stop = self.vote.after(num_done)
        if stop is not None and stop.why == "failed":
            raise CheckpointError(stop.text)
        return stop

    def _next_batches(self, feeder: Feeder[StepBatches]) -> StepBatches:
        self.rank.reporter.at(0, "READ DATA", ())
        # Only the copy to the device is left; batches were made in the feeder's thread.
        made = feeder.next()
        return made._replace(micros=[micro.to(self.rank.engine.device) for micro in made.micros])

    def _record(
        self, step: int, result: StepResult, rate: float, batches: StepBatches, data_s: float, step_s: float
    ) -> StepRecord:
        # The clock's categories cover the engine's step; the rest of the wall time is `other`.
        time_s = {**result.time_s, **self.copies.time_s, "data": data_s}
        time_s["other"] = time_s.get("other", 0.0) + step_s - sum(time_s.values())
        num_tokens = result.num_tokens if batches.num_tokens is None else batches.num_tokens
        return StepRecord(
            step=step + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            learning_rate=rate,
            num_tokens=num_tokens,
            step_s=step_s,
            outer=outer_figures(result.outer),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            quantisation_error=result.quantisation_error,
            router_losses=result.router_losses,
            pairs=self.rank.learning.figures(step, self.rank.engine),
            dropped=result.dropped,
            time_s=time_s,
            balance=batches.balance,
            slow_ranks=self.slow.factors,
            slowest=self.slow.slowest,
            **self.gauges.read(step + 1, result, num_tokens, step_s),
        )

    def _finish(self, summary: Summary) -> None:
        with self._saved_first():
            results = self.rank.engine.finish()
        if results:
            summary.finish(results)
            self.rank.observer.note(f"islands have agreed on all parameters: {outer_words(results)}")

    def _evaluated(self, num_done: int) -> dict[str, dict[str, float]]:
        def passed(number: int) -> None:
            # A rank in an evaluation is ahead of one in the step.
            self.rank.reporter.num_before = (number + 1) * len(self.rank.engine.program.instructions)

        self.rank.reporter.is_compiling = bool(self.rank.run.train.compile) and self.validation.is_first
        if self.rank.reporter.is_compiling:
            self.rank.dog.idle("compiling the blocks, in its first evaluation")
        with self._saved_first():
            found = self.validation.after(num_done, passed)
        self.rank.reporter.num_before, self.rank.reporter.is_compiling = 0, False
        return {name: {"loss": each.loss, "tokens": float(each.num_tokens)} for name, each in found.items()}


def _check_rounding(result: StepResult, number: int, budget: Mapping[str, float]) -> None:
    """Raises `TrainingError` if a message class exceeded its error budget in step `number` (from 1)."""
    for message, limit in budget.items():
        error = result.quantisation_error.get(message, 0.0)
        if error > limit:
            raise TrainingError(
                f"step {number}: the relative rounding error of {message} messages since the step before is "
                f"{error:.3g}, above train.error_budget.{message} = {limit:g}: use a wider wire format or a smaller "
                "block, and resume from the last checkpoint if there is one"
            )
