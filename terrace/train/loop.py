"""The training loop of one rank.

    with the world joined:  engine -> resume -> calibrate and predict -> steps and checkpoints -> sample

User mistakes have been caught before; only the machine can still fail here.
"""

from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from terrace.checkpoint.layout import folder_of
from terrace.cluster.cluster import Cluster
from terrace.launch import flight
from terrace.launch.signals import SIGNALS
from terrace.launch.stop import Stop, StopSignal
from terrace.launch.watchdog import watch
from terrace.launch.world import World
from terrace.program.report import StepReport, plain, read_plain
from terrace.runtime.compiled import compiler_named
from terrace.runtime.engine import Engine
from terrace.train.adapted import attention_words
from terrace.train.busy import STEPPING, CoreSeconds, busy_since
from terrace.train.calibrate import calibrate, layer_flops_per_s, predict_once
from terrace.train.copies import copies_of
from terrace.train.effects import why_no_sample
from terrace.train.facts import facts_of
from terrace.train.follow_links import following_of
from terrace.train.gauges import Gauges
from terrace.train.job import RunJob
from terrace.train.meeting import meeting_of
from terrace.train.metrics import Observer, Outcome, SlowestRank, own_seconds
from terrace.train.profiler import Profiler
from terrace.train.rank import RankOfRun
from terrace.train.recorder import recorded
from terrace.train.records import Records, Shown, StepFigures
from terrace.train.run_folder import folder_lock
from terrace.train.sample import closing_sample
from terrace.train.saves import Saves
from terrace.train.slow_ranks import SlowRanks
from terrace.train.step_checks import StepChecks
from terrace.train.stepping import run_steps
from terrace.train.validation import Validation


def train(world: World, job: RunJob, observer: Observer) -> Outcome | Stop:
    """Trains to the last step. Every rank calls this with its own observer.

    SIGTERM and the other causes in terrace.launch.stop end a run early, after the same step on every rank and with a
    checkpoint of it. Raises `HangError` if another rank stopped, `CheckpointError` if a checkpoint cannot be written,
    `TrainingError` if the loss is NaN.
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
        return _outcome(RankOfRun(world, job, followed, dog), stop_signal)


def _outcome(rank: RankOfRun, stop_signal: StopSignal) -> Outcome | Stop:
    job, run, engine = rank.job, rank.run, rank.engine
    dog, observer = rank.dog, rank.observer
    outer = run.plan.outer
    first_step = rank.resume()
    meeting = meeting_of(rank, stop_signal)
    vote = meeting.vote(rank.world, stop_signal, outer)
    cluster, busy = _calibrated(rank, first_step)
    cost = rank.cost(cluster)
    made = rank.micro_batches(rank.batches, cost)
    dog.idle("preparing the objective")
    rank.learning.begin(engine, job, observer.note, dog.idle)
    first_step = meeting.join(first_step)
    saves, records = Saves(rank, cost, vote), Records(rank, first_step)
    validation = Validation(rank, lambda batches: rank.micro_batches(batches, cost), first_step)
    copies = copies_of(engine, rank.world, job, facts_of(job, cost), rank.reporter.at, observer.note)
    of_stages = copies.start(predict_once(engine, run, cluster), cluster, first_step)
    predicted = of_stages[engine.program.stage.index]  # a rank is compared with its own stage
    rank.reporter.patience.expect(outer, predicted.step_s)
    gauges = Gauges(rank, cluster, first_step, predicted.step_s, partial(layer_flops_per_s, engine, run))
    observer.started(predicted, cluster, first_step)
    if words := attention_words(run, engine.device):
        observer.detail(words)
    # In this order after each step: what is measured, what is known of it, and what follows from that.
    hooks = (
        following_of(rank, cluster, first_step),
        Profiler(engine, run, cluster, job.folder, observer.note),
        copies,
        StepFigures(rank),
        gauges,
        SlowRanks(rank),
        records,
        meeting,
        validation,
        Shown(rank, first_step),
        StepChecks(rank, first_step),
        saves,
    )
    before = CoreSeconds.now()
    with closing(
        meeting.stretches(made, rank.learning.fed(made), range(first_step, run.train.steps), saves.save_last)
    ) as stretches:
        stop = run_steps(rank, hooks, stretches)
    if stop is not None:
        rank.close()
        return stop
    # A program that came after the measurement makes steps longer than predicted. A compiler's own processes would be
    # taken for one.
    beside = "" if run.train.compile else busy_since(before, engine, STEPPING)
    busy = " and ".join(filter(None, (busy, beside)))
    summary = records.summary
    measured = rank.learning.report(engine.report(summary.mean_time_s))
    dog.idle("comparing the ranks")  # before the sample: rank 0 makes it and all others would wait
    stages, slowest = compare_ranks(engine, of_stages, measured)
    folder = folder_of(job.folder, run.train.steps)  # by number: a newer folder may exist, damaged
    result = Outcome(
        final_loss=summary.final_loss,
        num_steps=run.train.steps,
        checkpoint=folder,
        predicted=predicted,
        measured=measured,
        sample=_sample(rank, folder),
        quantisation_error=summary.quantisation_error,
        stages=stages,
        slowest=slowest,
        saves=saves.newest,
        num_timed=summary.num_timed,
        busy=busy,
    )
    rank.close()
    observer.finished(result)
    return result


def _calibrated(rank: RankOfRun, first_step: int) -> tuple[Cluster, str]:
    """The cluster with measured constants, and words on other programs that used the machine during the measurement.

    A probed cluster is used as it is, unless messages are paced. Any other gets constants measured here.
    """
    cluster, everyone = rank.run.cluster, tuple(range(rank.world.world_size))
    if cluster.is_measured and not rank.engine.comm.pacer.is_limited:
        return cluster, ""
    before = CoreSeconds.now()
    found = calibrate(rank.engine, rank.run, lambda what: rank.dog.at(first_step, 0, f"MEASURE {what}", everyone))
    return found, busy_since(before, rank.engine)


def _sample(rank: RankOfRun, folder: Path) -> str | None:
    if rank.world.rank != 0:
        return None
    rank.dog.idle("generating a sample")
    return None if why_no_sample(rank.run) else closing_sample(rank.job, folder)


def compare_ranks(
    engine: Engine, predicted: Sequence[StepReport], measured: StepReport
) -> tuple[tuple[tuple[StepReport, StepReport], ...], SlowestRank | None]:
    """Exchanges the ranks' reports. Every rank calls this with its `measured` report.

    Returns the (predicted, measured) pair of each pipeline stage, empty without a pipeline, and the slowest rank, None
    in a world of 1.
    """
    mesh, is_pipelined = engine.program.mesh, len(predicted) > 1
    if engine.program.cluster.world_size == 1:
        return (), None
    # Without a pipeline the reports of ranks differ in their times alone.
    own: dict[str, Any] = plain(measured) if is_pipelined else {"time_s": dict(measured.time_s)}
    of_ranks = engine.comm.exchange(own)
    stages: tuple[tuple[StepReport, StepReport], ...] = ()
    if is_pipelined:
        # The first data and tensor rank represents its stage.
        firsts = (of_ranks[mesh.at_stage(0, stage)] for stage in range(len(predicted)))
        stages = tuple(zip(predicted, map(read_plain, firsts), strict=True))
    rank = max(range(len(of_ranks)), key=lambda each: own_seconds(of_ranks[each]["time_s"]))
    stage = mesh.stage(rank)
    slowest = SlowestRank(
        rank=rank, stage=stage, predicted_s=predicted[stage].time_s, measured_s=of_ranks[rank]["time_s"]
    )
    return stages, slowest
