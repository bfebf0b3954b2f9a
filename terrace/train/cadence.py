"""After which steps a run saves: every so many, or at the interval that its measured stalls make best ("auto")."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import TYPE_CHECKING

from terrace.base.words import counted, seconds
from terrace.planner.goodput import Job, Save
from terrace.train.keys import AUTO
from terrace.train.planned import num_machines

if TYPE_CHECKING:
    from terrace.train.hooks import StepDone
    from terrace.train.rank import RankOfRun

FIRST = 3  # steps of a start before the first save of "auto": those before it warm up


class Cadence:
    """A save after every `every` steps; 0: never."""

    def __init__(self, every: int) -> None:
        self._every = every

    def is_due(self, done: "StepDone") -> bool:
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

    def is_due(self, done: "StepDone") -> bool:
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
