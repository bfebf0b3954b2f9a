"""StepReport: the cost of a step, predicted by the simulator or measured by the runtime."""

from collections.abc import Mapping
from dataclasses import dataclass

from terrace.plan.wire import MessageClass


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """One rank's step.

    `time_s` holds the compute categories (forward, backward, update), the time spent waiting for messages by class
    (`wait gather`, ...) and `other`; it sums to the step. `sent_bytes` counts bytes sent per (message class, tier).
    `memory_bytes` is the peak of each category of model state.
    """

    time_s: Mapping[str, float]
    sent_bytes: Mapping[tuple[MessageClass, str], int]
    memory_bytes: Mapping[str, int]

    @property
    def step_s(self) -> float:
        """Seconds of the whole step."""
        return sum(self.time_s.values())
