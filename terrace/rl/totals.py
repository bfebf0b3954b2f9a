"""Running means and maxima of a run's metrics, for its final summary. Memory does not grow with the steps."""

from collections import defaultdict
from collections.abc import Mapping

from terrace.rl.algorithms.metrics import Metrics


class Totals:
    """Mean and maximum of each metric over the steps.

    In means, a step without the metric counts as 0, except in `mean_that_have`.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums, self._nums = defaultdict[str, float](float), defaultdict[str, int](int)
        self._largest: dict[str, float] = {}
        self._first: Metrics = {}

    def add(self, found: Mapping[str, float]) -> None:
        if not self.num_steps:
            self._first = dict(found)
        self.num_steps += 1
        for name, value in found.items():
            self._sums[name] += value
            self._nums[name] += 1
            self._largest[name] = max(value, self._largest.get(name, value))

    @property
    def names(self) -> list[str]:
        """The names of all metrics, in order of first appearance."""
        return list(self._sums)

    def mean(self, name: str) -> float:
        return self._sums.get(name, 0.0) / self.num_steps

    def mean_that_have(self, name: str) -> float | None:
        """The mean over the steps that have the metric; None if none has it."""
        return self._sums[name] / self._nums[name] if name in self._nums else None

    def largest(self, name: str) -> float:
        """The maximum over the steps; 0 if none has the metric."""
        return self._largest.get(name, 0.0)

    def steady(self, name: str) -> float:
        """The mean over all steps but the first, unless there is only one."""
        if self.num_steps == 1:
            return self.mean(name)
        return (self._sums.get(name, 0.0) - self._first.get(name, 0.0)) / (self.num_steps - 1)
