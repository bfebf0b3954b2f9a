"""Means and maxima of the numbers of a run's steps, for its last words, in memory that does not grow with the steps."""

from collections import defaultdict
from collections.abc import Mapping

from terrace.rl.algorithms.metrics import Metrics


class Totals:
    """The mean and the largest value of each number over the steps.

    In means a step without a number counts as 0, except in `mean_that_have`.
    """

    def __init__(self) -> None:
        self.num_steps = 0
        self._sums, self._nums = defaultdict[str, float](float), defaultdict[str, int](int)
        self._largest: dict[str, float] = {}
        self._first: Metrics = {}

    def add(self, found: Mapping[str, float]) -> None:
        """Count the numbers of a step."""
        if not self.num_steps:
            self._first = dict(found)
        self.num_steps += 1
        for name, value in found.items():
            self._sums[name] += value
            self._nums[name] += 1
            self._largest[name] = max(value, self._largest.get(name, value))

    @property
    def names(self) -> list[str]:
        """The names of all numbers, in the order in which they came."""
        return list(self._sums)

    def mean(self, name: str) -> float:
        """The mean over all steps."""
        return self._sums.get(name, 0.0) / self.num_steps

    def mean_that_have(self, name: str) -> float | None:
        """The mean over the steps that have the number; None where none has."""
        return self._sums[name] / self._nums[name] if name in self._nums else None

    def largest(self, name: str) -> float:
        """The largest of a number, 0 where no step has it."""
        return self._largest.get(name, 0.0)

    def steady(self, name: str) -> float:
        """The mean over all steps but the first, if there are others."""
        if self.num_steps == 1:
            return self.mean(name)
        return (self._sums.get(name, 0.0) - self._first.get(name, 0.0)) / (self.num_steps - 1)
