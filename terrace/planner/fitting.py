"""Whether whole candidates fit in memory: each gets the least recomputation with which it does."""

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import suppress

from terrace.base.errors import PlanError
from terrace.planner.estimate import Estimator
from terrace.planner.space import Space, recomputations
from terrace.planner.task import Candidate

_SURELY = 0.9  # part of the estimated tensors that a plan needs at least
_SMALL = 128  # candidates with the least estimates, whose memory is counted exactly if nothing fits
_PARTS = 8  # of the layers, in which the number of recomputed first ones is estimated


class Fitting:
    """Memory of one search's candidates, of which a plan may need `capacity_bytes`; `exact_bytes` counts it.

    `num_checked` counts those whose memory was counted exactly while searching.
    """

    def __init__(
        self, space: Space, estimator: Estimator, exact_bytes: Callable[[Candidate], float], capacity_bytes: float
    ) -> None:
        self.space, self.task, self.exact_bytes, self.capacity_bytes = space, space.task, exact_bytes, capacity_bytes
        self._small: list[tuple[float, Candidate]] = []  # ascending
        self.num_checked = 0
        self._fixed_bytes = estimator.whole_bytes(0.0)

    def may_fit(self, needed_bytes: float) -> bool:
        """Whether a candidate with this estimate fits if its tensors are a tenth smaller; the rest of a process is
        known.
        """
        least = self._fixed_bytes + _SURELY * (needed_bytes - self._fixed_bytes)
        return least <= self.capacity_bytes

    def remember(self, needed_bytes: float, candidate: Candidate) -> None:
        """Note a candidate that does not fit."""
        if len(self._small) < _SMALL or needed_bytes < self._small[-1][0]:
            insort(self._small, (needed_bytes, candidate))
            del self._small[_SMALL:]

    def smallest(self) -> Candidate | None:
        """The noted candidate that needs least memory and breaks no rule; None if there is none."""
        found = list[tuple[float, Candidate]]()
        for _, candidate in self._small:
            with suppress(PlanError):  # such as numbers that a schedule does not take
                found.append((self.exact_bytes(candidate), candidate))
        return min(found)[1] if found else None

    def recomputing(self, candidate: Candidate) -> Iterator[Candidate]:
        """The candidate with each recomputation, least first; of first layers, with a few numbers of them."""
        values = self.task.recomputations.values
        for value in recomputations(self.space, candidate.mesh):
            if not values[value].is_partial:
                yield candidate._replace(recompute=value)
                continue
            num = len(self.task.inner)
            for first in sorted({max(1, part * num // _PARTS) for part in range(1, _PARTS)} - {num}):
                yield candidate._replace(recompute=value, first=first)

    def fitting(self, candidate: Candidate, estimated_bytes: float) -> Candidate | None:
        """The candidate, or the one that recomputes as little more as it needs to fit; None if none fits."""
        if estimated_bytes <= self.capacity_bytes and self._fits(candidate):
            return candidate
        values = self.task.recomputations.values
        chain = recomputations(self.space, candidate.mesh)
        further = chain[chain.index(candidate.recompute) :]
        # Most candidates that do not fit do not fit with any recomputation.
        if len(further) > 1 and not self.may_fit(self._needed_bytes(self._with_most(candidate, further[-1]))):
            return None
        for value in further:
            found = candidate._replace(recompute=value, first=0)
            if values[value].is_partial:
                first = self._least_first(found)
                if first is not None:
                    return found._replace(first=first)
            elif self._fits(found):
                return found
        return None

    def _with_most(self, candidate: Candidate, value: int) -> Candidate:
        is_partial = self.task.recomputations.values[value].is_partial
        return candidate._replace(recompute=value, first=len(self.task.inner) - 1 if is_partial else 0)

    def _least_first(self, candidate: Candidate) -> int | None:
        """The fewest first layers to recompute with which a candidate fits; None if all are too few, or one more than
        too many.
        """
        enough = len(self.task.inner) - 1
        if enough < 1 or not self._fits(candidate._replace(first=enough)):
            return None
        numbers = range(1, enough + 1)
        return numbers[bisect_left(numbers, True, key=lambda first: self._fits(candidate._replace(first=first)))]

    def _fits(self, candidate: Candidate) -> bool:
        return self._needed_bytes(candidate) <= self.capacity_bytes

    def _needed_bytes(self, candidate: Candidate) -> float:
        """Memory of the fullest stage; infinite for a candidate that a rule refuses."""
        self.num_checked += 1
        try:
            needed = self.exact_bytes(candidate)
        except PlanError:
            return math.inf
        if needed > self.capacity_bytes:
            self.remember(needed, candidate)
        return needed
