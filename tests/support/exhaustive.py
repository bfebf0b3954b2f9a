"""Every candidate of a small space, evaluated: the reference for the search."""

from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.search import attempt, cores_of, units_of
from terrace.planner.space import OpenMesh, Space, meshes, placements


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
