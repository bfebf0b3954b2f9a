"""How much of its layers a plan must recompute to fit: the least, since more is slower.

Candidates that differ in `recompute` and `first` alone form a line, each recomputing all that the one before it does:
nothing; the first corner of terrace.planner.operations in one layer, in two, ... in all; the next corner in one layer.
One that fits is of interest if the one before it does not.
"""

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
    """Values of `recompute` on a mesh, as pins allow; each recomputes all that those before it do."""
    task, pins = space.task, space.pins
    tensor, context, pipeline = (mesh.total(axis) > 1 for axis in ("tensor", "context", "pipeline"))
    chain = task.recomputations.chain(tensor=tensor, context=context, partly=not pipeline)
    if "recompute" not in pins.ranges:
        return chain
    return [value for value in (chain[0], chain[-1]) if pins.allows("recompute", int(value > 0))]


class Needs:
    """The least recomputation with which plans of a space fit in this memory."""

    def __init__(self, space: Space, evaluator: "Evaluator", capacity_bytes: float) -> None:
        self.space, self.evaluator, self.capacity_bytes = space, evaluator, capacity_bytes
        self._known: dict[Candidate, bool] = {}
        self.num_layers = len(space.task.inner)
        self.values = space.task.recomputations.values

    def are_open(self, core: PartialCandidate) -> bool:
        """Whether the number of the first layers is still to be chosen."""
        return self.values[core.recompute].is_partial and not core.first

    def are_less(self, core: PartialCandidate, placement: Placement, unit: int) -> bool:
        """Whether a candidate that recomputes all layers alike fits with less."""
        if not core.recompute or core.first or self.are_open(core):
            return False
        chain = recomputations(self.space, core.shape.mesh)
        at = chain.index(core.recompute)
        if at == 0:
            return False
        before = core.candidate(placement, unit)._replace(recompute=chain[at - 1])
        if self.values[chain[at - 1]].is_partial:
            # Without another layer that could be the last, the corner before.
            before = before._replace(first=self.num_layers - 1) if self.num_layers > 1 else self._others(before)
        return self._fits(before)

    def first(self, core: PartialCandidate, placement: Placement, unit: int) -> list[int]:
        """The least number of first layers, fewer than all, with which a candidate fits; none if it needs none or all.

        Each further layer keeps less, so it is found by bisection.
        """
        candidate = core.candidate(placement, unit)
        too_few, enough = 0, self.num_layers - 1
        if not enough or self._fits(self._others(candidate)) or not self._fits(candidate._replace(first=enough)):
            return []
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            too_few, enough = (too_few, middle) if self._fits(candidate._replace(first=middle)) else (middle, enough)
        return [enough]

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
