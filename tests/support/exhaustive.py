"""Every candidate of a small space, evaluated: the reference for the search."""

import math
from collections.abc import Iterator

from terrace.plan.mesh import Mesh
from terrace.planner.bound import Bounds
from terrace.planner.candidate import PartialCandidate
from terrace.planner.evaluate import Evaluator
from terrace.planner.least_recomputation import recomputations
from terrace.planner.ranking import TIE, Estimate, ranked
from terrace.planner.schedule_pins import schedules
from terrace.planner.search import Search, attempt, in_units, units_of
from terrace.planner.space import OpenMesh, Space, closed, micro_batches, open_meshes, placements
from terrace.planner.task import Candidate, Task
from tests.support.planner_cases import evaluator_of


def meshes(space: Space) -> Iterator[Mesh]:
    """Every mesh allowed by the model, the batch and the pins."""
    for each in open_meshes(space):
        yield from closed(space, each)


def cores_of(space: Space, bounds: Bounds, shape: OpenMesh) -> Iterator[PartialCandidate]:
    """Every candidate of a shape, without placement and unit."""
    for micro_batch in micro_batches(space, shape.mesh.total("data")):
        for root in (bounds.root(shape, micro_batch, again) for again in recomputations(space, shape.mesh)):
            for schedule, chunks in schedules(space, shape.mesh.total("pipeline")):
                core = bounds.core(root, schedule, chunks)
                if core is not None:
                    yield from in_units(space, core)


def exhaustive(space: Space, evaluator: Evaluator, capacity_bytes: float) -> list[Estimate]:
    """Every candidate of a small space that fits, best first: the reference for the search."""
    found = []
    for core in (core for mesh in meshes(space) for core in cores_of(space, evaluator.bounds, OpenMesh(mesh))):
        for placement in placements(space, core.shape.mesh):
            for unit in units_of(space, core, placement):
                for candidate in _with_first(space.task, core.candidate(placement, unit)):
                    estimate = attempt(evaluator, candidate)
                    if estimate is not None and estimate.needed_bytes <= capacity_bytes:
                        found.append(estimate)
    return ranked(found)


def _with_first(task: Task, candidate: Candidate) -> list[Candidate]:
    if not task.recomputations.values[candidate.recompute].is_partial:
        return [candidate]
    return [candidate._replace(first=first) for first in range(1, len(task.inner))]


def least_recomputed(space: Space, everything: list[Estimate], capacity_bytes: float) -> list[Estimate]:
    """The candidates that fit, and would not with a step less of recomputation; the best first."""
    lines: dict[Candidate, list[Estimate]] = {}
    for each in everything:
        lines.setdefault(each.candidate._replace(recompute=0, first=0), []).append(each)
    found = []
    for candidate, line in lines.items():
        order = recomputations(space, candidate.mesh)
        line.sort(key=lambda each: (order.index(each.candidate.recompute), each.candidate.first))
        fits = [each.needed_bytes <= capacity_bytes for each in line]
        found += [each for at, each in enumerate(line) if fits[at] and not (at and fits[at - 1])]
    return ranked(found)


def check_search(task: Task, axes: tuple[str, ...]) -> list[Estimate]:
    """The search finds the same candidates in the same order, also where memory rules some of the best out.

    Every candidate, best first.
    """
    space, evaluator = Space(task=task, axes=axes), evaluator_of(task)
    everything = exhaustive(space, evaluator, math.inf)
    needs = sorted(each.needed_bytes for each in everything)
    tried = 0
    for share in (1.0, 0.5, 0.1):
        capacity = needs[int(share * (len(needs) - 1))]
        fitting = least_recomputed(space, everything, capacity)
        # Nothing that fits is faster than the best of these.
        assert fitting[0].step_s <= (1 + TIE) * min(each.step_s for each in everything if each.needed_bytes <= capacity)
        found = Search(space, evaluator, capacity).run(count=5, limit=10**6)
        assert [each.candidate for each in found.best] == [each.candidate for each in fitting[:5]]
        assert found.proved
        tried += found.num_evaluated
    assert tried < 3 * len(everything)
    return everything
