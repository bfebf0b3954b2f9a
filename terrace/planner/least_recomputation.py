"""The least recomputation with which a plan fits, since more is slower.

Candidates that differ only in `recompute` and `first` form a line, each recomputing at least what the previous one
does: nothing; the first corner of terrace.planner.operations in one layer, in two, ... in all; the next corner in one
layer, and so on. A candidate that fits matters only if the previous one does not.
"""

from bisect import bisect_left
from contextlib import suppress
from typing import TYPE_CHECKING

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.planner.candidate import PartialCandidate
from terrace.planner.space import Space
from terrace.planner.task import Candidate, Placement

if TYPE_CHECKING:
    from terrace.planner.evaluate import Evaluator


def recomputations(space: Space, mesh: Mesh) -> list[int]:
    """Values of `recompute` on a mesh, within the pins; each recomputes at least what the previous ones do."""
    task, pins = space.task, space.pins
    tensor, context, pipeline = (mesh.total(axis) > 1 for axis in ("tensor", "context", "pipeline"))
    chain = task.recomputations.chain(tensor=tensor, context=context, partly=not pipeline)
    if "recompute" not in pins.ranges:
        return chain
    return [value for value in dict.fromkeys((chain[0], chain[-1])) if pins.allows("recompute", int(value > 0))]


class Needs:
    """The least recomputation with which plans of a space fit in a given memory."""

    def __init__(self, space: Space, evaluator: "Evaluator", capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self._known: dict[Candidate, bool] = {}
        self.num_layers = len(space.task.inner)
        self.values = space.task.recomputations.values

    def are_open(self, core: PartialCandidate) -> bool:
        """Whether the number of first layers is still undetermined."""
        return self.values[core.recompute].is_partial and not core.first

    def are_less(self, core: PartialCandidate, placement: Placement, unit: int) -> bool:
        """Whether a candidate with uniform recomputation would fit with less."""
        if not core.recompute or core.first or self.are_open(core):
            return False
        chain = recomputations(self.space, core.shape.mesh)
        at = chain.index(core.recompute)
        if at == 0:
            return False
        before = core.candidate(placement, unit)._replace(recompute=chain[at - 1])
        if self.values[chain[at - 1]].is_partial:
            # Without another possible last layer, use the previous corner.
            before = before._replace(first=self.num_layers - 1) if self.num_layers > 1 else self._others(before)
        return self._fits(before)

    def least_first(self, core: PartialCandidate, placement: Placement, unit: int) -> int | None:
        """Lower bound on `first` from memory bounds alone; None if a candidate needs all layers."""
        bounds = self.evaluator.bounds

        def fits(first: int) -> bool:
            return bounds.least_bytes(bounds.partly(core, first), placement, unit) <= self.capacity_bytes

        numbers = range(1, self.num_layers)
        at = bisect_left(numbers, True, key=fits)
        return numbers[at] if at < len(numbers) else None

    def first(self, core: PartialCandidate, placement: Placement, unit: int) -> int | None:
        """The least number of first layers, fewer than all, with which a candidate fits; None if it needs none or all.

        Memory decreases with each further layer, so the result is minimal, or nearly so.
        """
        candidate, enough = core.candidate(placement, unit), self.num_layers - 1
        least = self.least_first(core, placement, unit)
        if least is None or (least == 1 and self._fits(self._others(candidate))):
            return None
        too_few, step = least - 1, 1
        while not self._fits(candidate._replace(first=min(too_few + step, enough))):
            too_few, step = too_few + step, 2 * step
            if too_few >= enough:
                return None
        numbers = range(too_few + 1, min(too_few + step, enough) + 1)
        return numbers[bisect_left(numbers, True, key=lambda first: self._fits(candidate._replace(first=first)))]

    def _others(self, candidate: Candidate) -> Candidate:
        value = self.space.task.recomputations.all_layers(candidate.recompute, least=True)
        return candidate._replace(recompute=value, first=0)

    def _fits(self, candidate: Candidate) -> bool:
        found = self._known.get(candidate)
        if found is None:
            with suppress(PlanError):
                found = self.evaluator.needed_bytes(candidate) <= self.capacity_bytes
            self._known[candidate] = found = bool(found)
        return found
