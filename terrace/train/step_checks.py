"""Ends a run whose step is not finite, rounds too much, or sends other bytes than were predicted."""

from shlex import quote
from typing import TYPE_CHECKING

from terrace.base.errors import TrainingError
from terrace.train.hooks import Hook, StepDone

if TYPE_CHECKING:
    from terrace.train.rank import RankOfRun


class StepChecks(Hook):
    """Checks every step, after its record was shown."""

    raises_together = True

    def __init__(self, rank: "RankOfRun", first_step: int) -> None:
        self._rank, self._first_step = rank, first_step

    def stepped(self, done: StepDone) -> None:
        if done.problem is not None:
            raise TrainingError(
                f"step {done.number} has {done.problem}. The run cannot go on; to see the step block by block: "
                f"terrace replay {quote(str(self._rank.job.folder))} --step {done.number}"
            ) from done.problem
        self._check_rounding(done)
        if not done.result.num_tokens:
            self._rank.observer.note(f"step {done.number} has no label that counts: its gradient is zero")
        if done.step == self._first_step:
            self._rank.engine.check_bytes()  # a wrong byte count stops the run before it has cost anything

    def _check_rounding(self, done: StepDone) -> None:
        for message, limit in self._rank.run.train.error_budget.items():
            error = done.result.quantisation_error.get(message, 0.0)
            if error > limit:
                raise TrainingError(
                    f"step {done.number}: the relative rounding error of {message} messages since the step before is "
                    f"{error:.3g}, above train.error_budget.{message} = {limit:g}: use a wider wire format or a "
                    "smaller block, and resume from the last checkpoint if there is one"
                )
