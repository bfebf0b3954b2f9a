"""A trainer's times, and its report of its steps."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from terrace.base.words import counted
from terrace.program.report import StepReport


@dataclass(frozen=True, kw_only=True)
class TrainerReport:
    """A step of this rank, predicted (None before the first step, or without `predict`) and measured. Prints as a
    table.
    """

    predicted: StepReport | None
    measured: StepReport
    num_steps: int

    def __str__(self) -> str:
        none: Mapping[Any, float] = {}
        rows = [f"{'mean of ' + counted(self.num_steps, 'step'):28}{'predicted':>14}{'measured':>14}"]
        for title, name, unit in (
            ("time", "time_s", "s"),
            ("sent", "sent_bytes", "B"),
            ("memory", "memory_bytes", "B"),
        ):
            measured = getattr(self.measured, name)
            predicted = none if self.predicted is None else getattr(self.predicted, name)
            for key in dict.fromkeys([*predicted, *measured]):
                label = " on ".join(str(getattr(part, "value", part)) for part in key) if key is not str(key) else key
                figures = [f"{table[key]:.6g} {unit}" if key in table else "-" for table in (predicted, measured)]
                if any(table.get(key) for table in (predicted, measured)):
                    rows.append(f"{f'{title}: {label}':28}{figures[0]:>14}{figures[1]:>14}")
        return "\n".join(rows)


class StepTimes:
    """Sums the seconds of a trainer's steps. `predicted` is its step once it is known."""

    def __init__(self) -> None:
        self.predicted: StepReport | None = None
        self._time_s: dict[str, float] = defaultdict(float)
        self._num_timed = 0

    def add(self, time_s: Mapping[str, float]) -> None:
        self._num_timed += 1
        for category, seconds in time_s.items():
            self._time_s[category] += seconds

    def expect(self, predicted: StepReport) -> None:
        """Sets the prediction after the first step, which included measurements and so does not count."""
        self.predicted = predicted
        self._time_s.clear()
        self._num_timed = 0

    def mean(self) -> dict[str, float]:
        return {category: total / max(1, self._num_timed) for category, total in self._time_s.items()}
