"""Runs the steps of one rank, with the hooks that follow each of them."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from terrace.base.errors import TrainingError
from terrace.data.feeding import Feeder
from terrace.launch.stop import Stop, begin_steps
from terrace.runtime.batch import Batch
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.step_sums import StepResult
from terrace.train.hooks import Hook, StepDone
from terrace.train.injected import BEGINS
from terrace.train.micro_batches import StepBatches
from terrace.train.schedule import learning_rate

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


def run_steps(
    rank: "RankOfRun", hooks: Sequence[Hook], stretches: Iterator[tuple[range, Feeder[StepBatches]]]
) -> Stop | None:
    """Runs all steps of `stretches` with their batches, or up to a stop that all ranks agree on. Every rank calls
    this.
    """
    rank.dog.begin()
    if rank.world.rank == 0:
        begin_steps(rank.world)
    for hook in hooks:
        hook.begin()
    stop = None
    for step, feeder in ((step, feeder) for steps, feeder in stretches for step in steps):
        for hook in hooks:
            hook.before(step)
        with _all_told(hooks):
            done = _stepped(rank, feeder, step)
        for hook in hooks:
            if hook.raises_together:
                with _all_told(hooks):
                    hook.stepped(done)
            else:
                hook.stepped(done)
        stop = done.stop
        if stop is not None:
            break
    for hook in reversed(hooks):
        hook.ended()
    return stop


@contextmanager
def _all_told(hooks: Sequence[Hook]) -> Iterator[None]:
    try:
        yield
    # All ranks of an island raise this after the same step while others still write, so a save can finish.
    except TrainingError:
        for hook in reversed(hooks):
            hook.failed()
        raise


def _stepped(rank: "RankOfRun", feeder: Feeder[StepBatches], step: int) -> StepDone:
    reporter = rank.reporter
    reporter.step, started_s = step, time.perf_counter()
    rate = learning_rate(step, rank.run.train, rank.run.optimizer)
    reporter.at(0, BEGINS, ())
    # Only the copy to the device is left; batches were made in the feeder's thread.
    made = feeder.next()
    data_s = time.perf_counter() - started_s
    if reporter.is_compiling:
        rank.dog.idle("compiling the blocks, in its first step")
    batches = rank.learning.ready(made, rank.engine)
    result, problem = _tried(rank.engine.step, batches.micros, rate)
    return StepDone(
        step=step, result=result, problem=problem, batches=batches, rate=rate, started_s=started_s, data_s=data_s
    )


def _tried(
    take: Callable[[Sequence[Batch], float], StepResult], micros: Sequence[Batch], rate: float
) -> tuple[StepResult, NonFiniteError | None]:
    try:  # a step that was given up has figures, too, which are shown before the run ends
        return take(micros, rate), None
    except NonFiniteError as error:
        if error.result is None:
            raise
        return error.result, error
