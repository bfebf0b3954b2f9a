"""What a concern of a run does around its steps: saves, evaluations, copies, metrics, gauges, traces, checks."""

from dataclasses import dataclass, field
from typing import Any

from terrace.launch.stop import Stop
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.step_sums import StepResult
from terrace.train.metrics import StepRecord
from terrace.train.micro_batches import StepBatches


@dataclass(kw_only=True)
class StepDone:
    """A step that has ended. Hooks read it, and add to it for those behind them.

    `step` counts from 0. `problem` is set if the step was given up because a figure is not finite. `figures` are fields
    of the step's record, which `record` has once it is made. `best_step` is the one whose checkpoint is kept, and
    `is_new_best` tells whether it is this step. `is_saved`: a checkpoint of it has begun. `stop` ends the run.
    """

    step: int
    result: StepResult
    problem: NonFiniteError | None
    batches: StepBatches
    rate: float  # learning rate
    started_s: float  # time.perf_counter
    data_s: float  # waited for the batches
    figures: dict[str, Any] = field(default_factory=dict)
    made: StepRecord | None = None
    best_step: int = -1  # none yet
    is_new_best: bool = False
    is_saved: bool = False
    stop: Stop | None = None

    @property
    def number(self) -> int:
        """Steps done, this one included."""
        return self.step + 1

    @property
    def record(self) -> StepRecord:
        assert self.made is not None, "hooks before the record have only figures"
        return self.made


class Hook:
    """Called around the steps of a run, on every rank at the same points. Methods do nothing by default.

    `raises_together`: a `TrainingError` of the hook is raised after the same step by all ranks of an island, so that
    other hooks may still exchange messages (`failed`).
    """

    raises_together = False

    def begin(self) -> None:
        """Called once before the first step."""

    def before(self, step: int) -> None:
        """Called before step `step` (from 0)."""

    def stepped(self, done: StepDone) -> None:
        """Called after a step, in the order of the hooks."""

    def ended(self) -> None:
        """Called after the last step or a stop, in reverse order."""

    def failed(self) -> None:
        """Called after a `TrainingError` that every rank of the island has raised."""
