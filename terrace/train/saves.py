"""When a run saves checkpoints, and the vote on an early stop, which always leaves one."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from terrace.base.errors import CheckpointError
from terrace.base.words import counted, seconds
from terrace.checkpoint.saved import Saved
from terrace.checkpoint.saving import Saver
from terrace.launch.stop import Stop, Vote
from terrace.planner.goodput import Job, Save
from terrace.sequence.cost import WorkCost
from terrace.train.facts import facts_of
from terrace.train.hooks import Hook, StepDone
from terrace.train.keys import AUTO
from terrace.train.metrics import NUM_SAVES
from terrace.train.planned import num_machines

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun

_PATIENCE = 10  # timeouts that rank 0 waits for files of others
FIRST = 3  # steps of a start before the first save of "auto": those before it warm up


class Cadence:
    """A save after every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, done: StepDone) -> bool:
        """Whether a save follows the step. Called once after every step."""
        return self._every > 0 and done.number % self._every == 0

    def saved(self, stall_s: float, write_s: float) -> None:
        """A save has begun and stalled this rank; `write_s` is of the newest that is complete, 0 before there is one.

        All ranks call this after the same steps.
        """


class Measured(Cadence):
    """The interval with the highest goodput, agreed anew by all ranks after every save (docs/failures.md).

    `exchange` sends a rank's figures to all ranks. The first save follows the `FIRST`th step of a start.
    """

    def __init__(
        self,
        job: Job,
        exchange: Callable[[tuple[float, ...]], Sequence[tuple[float, ...]]],
        note: Callable[[str], None],
    ) -> None:
        super().__init__(0)
        self._job, self._exchange, self._note = job, exchange, note
        self._steps_left, self._noted = FIRST, 0
        self._steps_s: list[float] = []  # since the last save
        self._stalls_s: list[float] = []

    def is_due(self, done: StepDone) -> bool:
        self._steps_s.append(done.record.step_s)
        self._steps_left -= 1
        return self._steps_left <= 0

    def saved(self, stall_s: float, write_s: float) -> None:
        self._stalls_s.append(stall_s)
        # The first save allocates its memory: it counts while there is no other.
        own = (median(self._stalls_s[1:] or self._stalls_s), median(self._steps_s), write_s)
        stall_s, step_s, write_s = map(max, zip(*self._exchange(own), strict=True))
        interval = self._job.best_steps(step_s, Save(stall_s=stall_s, write_s=write_s))
        self._steps_left = interval
        self._steps_s.clear()
        if not 0.8 * self._noted <= interval <= 1.25 * self._noted:
            self._noted = interval
            self._note(
                f"saves every {counted(interval, 'step')}, {seconds(interval * step_s)}: a save stalls "
                f"{seconds(stall_s)}, and something fails every {self._job.mean_s / 3600:.3g} h"
            )


def cadence_of(rank: "RankOfRun") -> Cadence:
    train, cluster, failures = rank.run.train, rank.run.cluster, rank.run.cluster.failures
    if train.checkpoint_every != AUTO:
        return Cadence(train.known_every)
    mean_s = failures.mean_s(cluster.world_size, num_machines(cluster))
    job = Job(mean_s=mean_s, restart_s=failures.restart_s)
    return Measured(job, rank.engine.comm.exchange, rank.observer.note)


class Saves(Hook):
    """The checkpoints of a run. `newest` holds the last `NUM_SAVES` complete ones."""

    def __init__(self, rank: "RankOfRun", cost: WorkCost | None, vote: Vote) -> None:
        train = rank.run.train
        self._rank, self._vote, self.newest = rank, vote, tuple[Saved, ...]()
        self._cadence = cadence_of(rank)
        self._saver = Saver(
            rank.engine,
            rank.world,
            rank.job.folder,
            facts_of(rank.job, cost),
            train.keep_checkpoints,
            background=train.background_save,
            limit_s=_PATIENCE * train.timeout_s,
        )

    def begin(self) -> None:
        beside = "is written beside the steps" if self._rank.run.train.background_save else "is waited for"
        # Checkpoints are copied to main memory first, which the user must have room for.
        staged_mb = self._saver.staging_bytes / 1e6
        self._rank.observer.detail(
            f"a checkpoint takes {staged_mb:.3g} MB of this rank's main memory while it {beside}"
        )
        if self._rank.job.resume is None:
            self._save(0, -1)  # a folder that cannot be written ends the run in its first minute

    def stepped(self, done: StepDone) -> None:
        train = self._rank.run.train
        is_last = done.number == train.steps
        # A stop is voted on after every step but the last, and always leaves a checkpoint.
        if done.stop is None:  # else this island leaves its roster
            done.stop = None if is_last else self._voted(done.number)
        due = self._cadence.is_due(done)
        if due or done.stop is not None or is_last or done.is_new_best:
            stall_s, done.is_saved = self._save(done.number, done.best_step), True
            if not is_last and done.stop is None:
                self._cadence.saved(stall_s, self.newest[-1].write_s if self.newest else 0.0)

    def save_last(self) -> None:
        """Save the state after all steps of a run of which this island did not train the last."""
        self._save(self._rank.run.train.steps, -1)

    def ended(self) -> None:
        self.failed()
        # Until the other ranks know the outcome of the save, too.
        self._saver.close()

    def failed(self) -> None:
        """Waits for a running save. Raises `CheckpointError` on every rank if any rank could not write."""
        self._rank.dog.idle("finishing a checkpoint")
        self._saver.finish()
        self._tell()

    def _save(self, step: int, best: int) -> float:
        """Starts a checkpoint after `step` steps. The one after step `best` is kept, however old it is.

        Returns the seconds for which this rank stood still.
        """
        # Messages under way are waited for here instead of in the next step, so they are no part of the stall.
        self._rank.engine.drain()
        self._rank.dog.idle("saving a checkpoint")
        if self._saver.is_under_way:
            self._rank.observer.note(f"step {step}: waiting for the checkpoint before, which is still being written")
        begin_s = time.perf_counter()
        self._saver.start(step, best)
        stall_s = time.perf_counter() - begin_s
        self._tell()
        self._rank.engine.check_bytes()
        return stall_s

    def _voted(self, num_done: int) -> Stop | None:
        self._tell()
        # A rank that failed to save tells the others through the vote, so that all stop after the same step.
        if self._saver.problem:
            self._vote.fail(self._saver.problem)
        stop = self._vote.after(num_done)
        if stop is not None and stop.why == "failed":
            raise CheckpointError(stop.text)
        return stop

    def _tell(self) -> None:
        """Passes finished background saves on to the observer."""
        while (saved := self._saver.news()) is not None:
            self.newest = (*self.newest, saved)[-NUM_SAVES:]
            self._rank.observer.saved(saved.folder)
