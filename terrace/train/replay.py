"""Repeats one step of a run on the same ranks: restores a checkpoint, reads the step's data and inspects
every block.
"""

import math
from dataclasses import dataclass
from typing import Any

from terrace.base.errors import TrainingError
from terrace.launch.stop import StopSignal
from terrace.launch.watchdog import watch
from terrace.launch.world import World
from terrace.model.decoder import IGNORE_INDEX
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.finite import NonFiniteError, words
from terrace.runtime.objective import num_counted
from terrace.train.job import RunJob
from terrace.train.metrics import Silent
from terrace.train.rank import RankOfRun
from terrace.train.schedule import learning_rate

Row = tuple[int, int, int, float | None, float, str]  # rank, micro-batch, block, loss per label, gradient norm, words


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """A replayed step: rows of all ranks, the first result with inf or nan ("" if none), and the step's loss and
    gradient norm.
    """

    rows: list[Row]
    first: str
    loss: float
    grad_norm: float


def replay_rank(world: World, job: RunJob, number: int) -> Replayed:
    """Replays step `number` (from 1) on this rank.

    Top-level, so that a child process can import it. Raises `TrainingError` if an earlier step since the checkpoint is
    not finite.
    """
    with StopSignal(()), watch(world, timeout_s=job.run.train.timeout_s) as dog, dog.guard():
        rank = RankOfRun(world, job, Silent(), dog)
        engine = rank.engine
        first_step = rank.resume()
        made = rank.micro_batches(rank.batches, rank.cost(job.run.cluster))
        rank.learning.begin(engine, job, rank.observer.note, dog.idle, keeps=False)
        batches_of = rank.learning.fed(made)
        for step in range(first_step, number):
            rank.reporter.step = step
            rank.deal(step)
            micros = rank.learning.ready(batches_of(step), engine).micros
            if step == number - 1:
                break
            try:
                engine.step(micros, learning_rate(step, job.run.train, job.run.optimizer))
            except NonFiniteError as error:
                raise TrainingError(f"step {step + 1}, before step {number}, has {error}") from error
        examination = engine.examine(micros)
        labels = [max(1.0, float(num_counted(micro, IGNORE_INDEX))) for micro in micros]
        own: list[list[Any]] = [
            [
                visit.rank,
                visit.micro,
                visit.block,
                None if visit.loss is None else visit.loss / labels[visit.micro],
                visit.gradient_norm,
                visit.bad,
            ]
            for _, visit in sorted(examination.visits.items())
        ]
        told = engine.comm.exchange([own, examination.first])
        first = min((found for _, found in told if found is not None), default=None)
        loss, grad_norm = _figures(engine, micros, learning_rate(step, job.run.train, job.run.optimizer))
        rank.close()
    rows: list[Row] = [tuple(row) for rows_there, _ in told for row in rows_there]
    return Replayed(rows=rows, first="" if first is None else words(first), loss=loss, grad_norm=grad_norm)


def _figures(engine: Engine, micros: list[Batch], lr: float) -> tuple[float, float]:
    # The whole step, with an update that is discarded, so that sums over all ranks are those of the run.
    try:
        result = engine.step(micros, lr)
    except NonFiniteError as error:
        return (math.nan, math.nan) if error.result is None else (error.result.loss, error.result.grad_norm)
    return result.loss, result.grad_norm
