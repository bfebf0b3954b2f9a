"""The training loop of one rank.

    with the world joined:  engine -> resume -> calibrate and predict -> steps and checkpoints -> sample

All user mistakes are caught before; only the machine can still fail here.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from shlex import quote

import torch

from terrace.base.errors import CheckpointError, ConfigError, TrainingError
from terrace.base.schema import dump, load
from terrace.checkpoint.layout import folder_of
from terrace.checkpoint.reading import Checkpoint
from terrace.cluster.cluster import Cluster
from terrace.comm.groups import Timeouts
from terrace.comm.pace import Pacer
from terrace.data.batches import Batches
from terrace.data.eval_batches import EvalBatches
from terrace.data.feeding import Feeder
from terrace.launch import flight
from terrace.launch.signals import SIGNALS
from terrace.launch.start import pace
from terrace.launch.stop import Stop, StopSignal, Vote, begin_steps
from terrace.launch.watchdog import Watchdog, watch
from terrace.launch.world import World
from terrace.model.facts import vocabulary_size
from terrace.model.hf.pretrained import Pretrained
from terrace.model.init import initial_value
from terrace.model.lora.config import is_adapter
from terrace.plan.context import is_context_parallel
from terrace.runtime.batch import Batch
from terrace.runtime.compiled import compiler_named
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.step_sums import StepResult
from terrace.sequence.cost import WorkCost
from terrace.train.adapted import run_blocks_of
from terrace.train.attention_cost import kept_cost, work_cost
from terrace.train.attention_words import attention_words
from terrace.train.busy import CoreSeconds, busy_since
from terrace.train.calibrate import calibrate, predict_once
from terrace.train.compared import compare_ranks
from terrace.train.context_batches import ContextBatches
from terrace.train.copies import Copies, take_up
from terrace.train.effects import why_no_sample
from terrace.train.error_budget import check_rounding
from terrace.train.facts import facts_of
from terrace.train.gauges import Gauges
from terrace.train.job import RunJob, device_of
from terrace.train.lock import folder_lock
from terrace.train.metrics import MetricsFile, Observer, Outcome, StepRecord, Summary, outer_figures, outer_words
from terrace.train.micro_batches import MicroBatches, StepBatches
from terrace.train.pairs import Learning
from terrace.train.patience import APART, Patience
from terrace.train.profiler import Profiler
from terrace.train.recorder import recorded
from terrace.train.sample import closing_sample
from terrace.train.saves import Saves
from terrace.train.schedule import learning_rate
from terrace.train.slow import SlowRanks
from terrace.train.validation import Validation, eval_batches_of


def train(world: World, job: RunJob, observer: Observer) -> Outcome | Stop:
    """Trains to the last step. Every rank calls this, each with its own observer.

    SIGTERM and the other causes in terrace.launch.stop end a run early: after the same step on every rank, with a
    checkpoint of it. Raises `HangError` when another rank stopped, `CheckpointError` when nothing can be saved,
    `TrainingError` when the loss is NaN.
    """
    following = recorded(observer, job) if world.rank == 0 else nullcontext(observer)
    holding = folder_lock(job.folder) if world.rank == 0 else nullcontext()
    flights, why_not = flight.flight_recorder(job.folder / flight.FOLDER)
    # Local ranks leave signals to the process that started them, which passes a stop on through the store.
    with (
        StopSignal(SIGNALS if world.supervised else SIGNALS[:1]) as stop_signal,
        watch(world, timeout_s=job.run.train.timeout_s, stops=job.again(), recorder=flights) as dog,
        dog.guard(),
        holding,
        following as followed,
        compiler_named() if job.run.train.compile else nullcontext(),
    ):
        if why_not:
            followed.note(why_not)
        return RankOfRun(world, job, followed, dog, stop_signal).outcome()


class RankOfRun:
    """A rank of a run: its engine, and its state and data as they are at any step."""

    def __init__(self, world: World, job: RunJob, observer: Observer, dog: Watchdog, stop_signal: StopSignal) -> None:
        run, rate = job.run, pace()
        if rate is not None and device_of().type == "cuda":
            raise ConfigError("TERRACE_PACE paces messages of CPU ranks only: unset it, or set CUDA_VISIBLE_DEVICES=''")
        self.world, self.job, self.run, self.observer, self.dog = world, job, run, observer, dog
        self.step, self.patience, self.learning = 0, Patience(), Learning(run)
        self.busy = ""  # words on other programs that used the machine while it was measured
        self.num_before = 0  # instructions of the step and of evaluations behind it, before those that run
        starts_with = run.train.weights if job.resume is None else ""
        # A resumed run has its values in the checkpoint, so the starting weights are not read again.
        self._pretrained = Pretrained(starts_with, run.model, adds_rows=True) if starts_with else None
        self.compiling = bool(run.train.compile)  # compiling may take minutes in the first step
        self.engine = Engine(
            run_blocks_of(run, device_of()),
            names=[spec.name for spec in run.blocks()],
            cluster=run.cluster,
            plan=run.plan,
            num_micros=run.num_micros(),
            objective=self.learning.objective,
            rank=world.rank,
            device=device_of(),
            optimizer=run.optimizer,
            initial=self._initial,
            freeze=run.train.freeze,
            declared=run.blocks(),
            sequence=run.train.sequence,
            # Longer than the watchdog's, which names the culprit.
            timeout=Timeouts(timedelta(seconds=2 * run.train.timeout_s), APART),
            pacer=Pacer(run.cluster, rate) if rate is not None else None,
            progress=self._at,
            compiled=bool(run.train.compile),
            balance=run.balance,
            seed=run.train.seed,
            verified=True,  # by the process that prepared the job
        )
        self._pretrained = None  # the engine has copied the values; this closes the files
        if self.engine.island is not None:
            dog.name_island(self.engine.island.numbers.island)
            self.patience.follow(self.engine.island, waits_anywhere=self.engine.device.type == "cuda")
        outer, train = run.plan.outer, run.train
        turns = {} if outer is None else {"turn": outer.every // outer.fragments, "delay": outer.delay}
        self.vote = Vote(world, stop_signal, **turns)
        self.batches = Batches(
            job.sources, train.sequence, run.rows, train.seed, run.data.holdout, vocabulary_size(run.model)
        )
        self.cost: WorkCost | None = None  # of attention; only on the context axis

    def _at(self, counter: int, instruction: object, waiting_on: tuple[int, ...]) -> None:
        # The watchdog would take a long compilation for a hang.
        if not self.compiling:
            extra_s = self.patience.seconds(self.step, instruction, waiting_on)
            self.dog.at(self.step, self.num_before + counter, instruction, waiting_on, extra_s)

    def _initial(self, block: str, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self.job.resume is not None:
            return torch.zeros(1).expand(shape)  # the checkpoint has the values
        # A score that the folder of a causal model lacks begins as in a new model.
        if self._pretrained is not None and not is_adapter(name) and (block, name) in self._pretrained:
            return self._pretrained.value(block, name)
        return initial_value(self.run.model, block, name, shape, self.run.train.seed)

    def outcome(self) -> Outcome | Stop:
        first_step = self.resume()
        # A probed cluster is used as it is; any other gets constants measured here.
        cluster, at, everyone = self.run.cluster, self.dog.at, tuple(range(self.world.world_size))
        if not cluster.is_measured or self.engine.comm.pacer is not None:  # probed constants exclude the pace
            before = CoreSeconds.now()
            cluster = calibrate(self.engine, self.run, lambda what: at(first_step, 0, f"MEASURE {what}", everyone))
            self.busy = busy_since(before, self.engine)
        made = self.micro_batches(cluster)
        self.dog.idle("reading the reference of DPO")
        self.learning.begin(self.engine, self.batches, self.job, self.observer.note, self.dog.idle)
        self.saves = Saves(self.engine, self.world, self.job, self.cost, self.dog, self.observer)
        sources = eval_batches_of(self.run, self.batches, self.job.eval_sources)
        self.validation = Validation(self.engine, self.run.train, sources, self._micro_batches_of)
        self.validation.resume(self.job.folder, first_step)
        facts = facts_of(self.job, self.cost)
        self.copies = Copies(self.engine, self.world, self.job, facts, self._at, self.observer.note)
        of_stages = self.copies.start(predict_once(self.engine, self.run, cluster), cluster, first_step)
        predicted = of_stages[self.engine.program.stage.index]  # a rank is compared with its own stage
        self.patience.expect(self.run.plan.outer, predicted.step_s)
        self.gauges = Gauges(self.engine, self.job, cluster, first_step, predicted.step_s, self.observer.note)
        self.observer.started(predicted, cluster, first_step)
        self.slow = SlowRanks(self.dog, self.engine.program, self.run.train, self.observer)
        self.profiler = Profiler(self.engine, self.run, cluster, self.job.folder)
        # Closed on any error too: its thread would go on reading data.
        with closing(Feeder(self.learning.fed(made), first_step, self.run.train.steps)) as feeder:
            summary, stop = self._steps(first_step, feeder)
        self.saves.close()
        self.copies.close()
        if stop is not None:
            self.engine.close()
            return stop
        measured = self.engine.report(summary.mean_time_s)
        self.dog.idle("comparing the ranks")  # before the sample: rank 0 makes it and all others would wait
        stages, slowest = compare_ranks(self.engine, of_stages, measured)
        folder = folder_of(self.job.folder, self.run.train.steps)  # by number: a newer folder may exist, damaged
        result = Outcome(
            final_loss=summary.final_loss,
            num_steps=self.run.train.steps,
            checkpoint=folder,
            predicted=predicted,
            measured=measured,
            sample=self._sample(folder),
            quantisation_error=summary.quantisation_error,
            stages=stages,
            slowest=slowest,
            saves=self.saves.newest,
            num_timed=summary.num_timed,
            busy=self.busy,
        )
        self.engine.close()
        self.observer.finished(result)
        return result

    def resume(self) -> int:
        if self.job.resume is None:
            return 0
        # Reading takes as long as the disk needs, so no timeout runs.
        self.dog.idle("loading the checkpoint")
        return take_up(self.job.resume, self.job, self.engine, self.world, self.observer.note)

    def micro_batches(self, cluster: Cluster) -> MicroBatches:
        run, program = self.run, self.engine.program
        if is_context_parallel(program.mesh, run.plan):
            if self.job.resume is not None:
                self.cost = kept_cost(run, Checkpoint(self.job.resume).facts)
            # Rank 0's figures for all: ranks that measured different ones would assign documents differently.
            own = dump(self.cost or work_cost(run, cluster))
            self.cost = load(WorkCost, self.engine.comm.exchange(own)[0], "the cost of rank 0")
        return self._micro_batches_of(self.batches)

    def _micro_batches_of(self, batches: Batches | EvalBatches) -> MicroBatches:
        run, program, rank, context = self.run, self.engine.program, self.world.rank, None
        if self.cost is not None:
            context = ContextBatches(batches, run.cluster, run.plan, program.num_micros, rank, self.cost)
        return MicroBatches(batches, program, rank, self.engine.device.type == "cuda", context)

    def _steps(self, first_step: int, feeder: Feeder[StepBatches]) -> tuple[Summary, Stop | None]:
        train, outer = self.run.train, self.run.plan.outer
        summary = Summary(train.steps - first_step, 1 if outer is None else outer.every)
        metrics = MetricsFile(self.job.folder / "metrics.jsonl", first_step) if self.world.rank == 0 else None
        if metrics is not None and metrics.num_lost:
            self.observer.note(f"metrics.jsonl lacks {metrics.num_lost} of the first {first_step} steps")
        stop = None
        self.dog.begin()
        if self.world.rank == 0:
            begin_steps(self.world)
        if self.validation.words:
            self.observer.note(self.validation.words)
        for words in filter(None, (self.saves.words, attention_words(self.run, self.engine.device))):
            self.observer.detail(words)
        if self.job.resume is None:
            self.saves.save(0)  # a folder that cannot be written ends the run in its first minute
        # The time left is estimated without the first checkpoint.
        begin = time.perf_counter()
        # An attribute, so that watchdog messages name the step.
        for self.step in range(first_step, train.steps):
            started = time.perf_counter()
            rate = learning_rate(self.step, train, self.run.optimizer)
            batches = self._next_batches(feeder)
            data_s = time.perf_counter() - started
            if self.compiling:
                self.dog.idle("compiling the blocks, in its first step")
            with self._saved_first(), self.profiler.around(self.step):
                result, problem = self._try(batches.micros, rate)
            self.copies.after(self.step + 1, is_finite=problem is None)
            self.compiling = False
            record = self._record(result, rate, batches, data_s, time.perf_counter() - started)
            self.slow.stepped(result, data_s, record.step_s)
            summary.add(record)
            num_done = self.step + 1
            if num_done == train.steps and problem is None:
                self._finish(summary)
            if self.validation.is_due(num_done) and problem is None:
                record = replace(record, eval=self._evaluated(num_done))
            if metrics is not None:
                metrics.write(record)
            done = self.step + 1 - first_step
            per_step_s = (time.perf_counter() - begin) / done
            self.observer.stepped(record, per_step_s * (train.steps - self.step - 1))
            self._check(result, problem)
            if self.step == first_step:
                self.engine.check_bytes()  # a wrong byte count stops the run before it has cost anything
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
            self.observer.note(self.validation.best_words)
        if metrics is not None:
            metrics.close()
        return summary, stop

    def _try(self, micros: Sequence[Batch], rate: float) -> tuple[StepResult, NonFiniteError | None]:
        try:  # a step that was given up has figures, too, which are shown before the run ends
            return self.engine.step(micros, rate), None
        except NonFiniteError as error:
            if error.result is None:
                raise
            return error.result, error

    def _check(self, result: StepResult, problem: NonFiniteError | None) -> None:
        with self._saved_first():
            if problem is not None:
                number = self.step + 1
                raise TrainingError(
                    f"step {number} has {problem}. The run cannot go on; to see the step block by block: "
                    f"terrace replay {quote(str(self.job.folder))} --step {number}"
                ) from problem
            check_rounding(result, self.step, self.run.train.error_budget)
        if not result.num_tokens:
            self.observer.note(f"step {self.step + 1} has no label that counts: its gradient is zero")

    @contextmanager
    def _saved_first(self) -> Iterator[None]:
        try:
            yield
        # All ranks of an island raise this after the same step, and others still write their parts: the save can end.
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
        self._at(0, "READ DATA", ())
        # Only the copy to the device is left; batches were made in the feeder's thread.
        made = feeder.next()
        return made._replace(micros=[micro.to(self.engine.device) for micro in made.micros])

    def _record(
        self, result: StepResult, rate: float, batches: StepBatches, data_s: float, step_s: float
    ) -> StepRecord:
        # The clock's categories cover the engine's step; the rest of the wall time is `other`.
        time_s = {**result.time_s, **self.copies.time_s, "data": data_s}
        time_s["other"] = time_s.get("other", 0.0) + step_s - sum(time_s.values())
        num_tokens = result.num_tokens if batches.num_tokens is None else batches.num_tokens
        return StepRecord(
            step=self.step + 1,
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
            pairs=self.learning.figures(self.step, self.engine),
            dropped=result.dropped,
            time_s=time_s,
            balance=batches.balance,
            slow_ranks=self.slow.factors,
            slowest=self.slow.slowest,
            **self.gauges.read(self.step + 1, result, num_tokens, step_s),
        )

    def _finish(self, summary: Summary) -> None:
        with self._saved_first():
            results = self.engine.finish()
        if results:
            summary.finish(results)
            self.observer.note(f"islands have agreed on all parameters: {outer_words(results)}")

    def _evaluated(self, num_done: int) -> dict[str, dict[str, float]]:
        def passed(number: int) -> None:
            # A rank in an evaluation is ahead of one in the step.
            self.num_before = (number + 1) * len(self.engine.program.instructions)

        self.compiling = bool(self.run.train.compile) and self.validation.is_first
        if self.compiling:
            self.dog.idle("compiling the blocks, in its first evaluation")
        with self._saved_first():
            found = self.validation.after(num_done, passed)
        self.num_before, self.compiling = 0, False
        return {name: {"loss": each.loss, "tokens": float(each.num_tokens)} for name, each in found.items()}

    def _sample(self, folder: Path) -> str | None:
        if self.world.rank != 0:
            return None
        self.dog.idle("generating a sample")
        return None if why_no_sample(self.run) else closing_sample(self.job, folder)
