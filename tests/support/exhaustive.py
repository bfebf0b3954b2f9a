"""Every candidate of a small space, evaluated: the reference for the search."""

import math

from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.search import Search, attempt, cores_of, units_of
from terrace.planner.space import OpenMesh, Space, meshes, placements
from terrace.planner.task import Task
from tests.support.planner_cases import evaluator_of


def exhaustive(space: Space, evaluator: Evaluator, capacity_bytes: float) -> list[Estimate]:
    """Every candidate of a small space that fits, best first: the reference for the search."""
    found = []
    for core in (core for mesh in meshes(space) for core in cores_of(space, evaluator.bounds, OpenMesh(mesh))):
        for placement in placements(space, core.shape.mesh):
            for unit in units_of(space, core, placement):
                estimate = attempt(evaluator, core.candidate(placement, unit))
                if estimate is not None and estimate.needed_bytes <= capacity_bytes:
                    found.append(estimate)
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
        fitting = ranked(each for each in everything if each.needed_bytes <= capacity)
        found = Search(space, evaluator, capacity).run(count=5, limit=10**6)
        assert [each.candidate for each in found.best] == [each.candidate for each in fitting[:5]]
        assert found.proved
        tried += found.num_evaluated
    assert tried < 3 * len(everything)
    return everything
