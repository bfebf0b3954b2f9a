"""The rounding errors of a step against the budget that a run sets."""

from collections.abc import Mapping

from terrace.base.errors import TrainingError
from terrace.runtime.step_sums import StepResult


def check_rounding(result: StepResult, step: int, budget: Mapping[str, float]) -> None:
    """Raise `TrainingError` where a message class of step number `step`, from 0, has more than its budget."""
    for message, limit in budget.items():
        error = result.quantisation_error.get(message, 0.0)
        if error > limit:
            raise TrainingError(
                f"step {step + 1}: the relative rounding error of {message} messages since the step before is "
                f"{error:.3g}, above train.error_budget.{message} = {limit:g}: use a wider wire format or a smaller "
                "block, and resume from the last checkpoint if there is one"
            )
