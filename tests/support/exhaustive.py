"""Every plan of a small space, played: the reference for the search. Prices of the search play no part in it."""

import math
from collections.abc import Iterator
from contextlib import suppress

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.search_limits import FINALISTS, MOST_PLAYED
from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate, ranked
from terrace.planner.schedule_pins import schedules
from terrace.planner.search import Search
from terrace.planner.space import (
    Space,
    closed,
    micro_batches,
    open_meshes,
    passing_units,
    placements,
    recomputations,
    units,
)
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task
from terrace.program.schedules.registry import takes_unit


def meshes(space: Space) -> Iterator[Mesh]:
    """Every mesh allowed by the model, the batch and the pins."""
    for each in open_meshes(space):
        yield from closed(space, each)


def candidates(space: Space) -> Iterator[Candidate]:
    """Every candidate of a space."""
    for mesh in meshes(space):
        for micro_batch in micro_batches(space, mesh.total("data")):
            micros = space.task.batch // (mesh.total("data") * micro_batch)
            for schedule, chunks in schedules(space, mesh.total("pipeline")):
                for placement in placements(space, mesh):
                    for unit in _units(space, schedule, placement, micros):
                        for again in recomputations(space, mesh):
                            found = Candidate(again, unit, schedule, chunks, micro_batch, placement, mesh)
                            yield from _with_first(space, found)


def _units(space: Space, schedule: str, placement: Placement, micros: int) -> tuple[int, ...]:
    if schedule != SERIAL and takes_unit(schedule):
        return passing_units(space, micros)
    return units(space, micros, placement, schedule != SERIAL)


def _with_first(space: Space, candidate: Candidate) -> list[Candidate]:
    if not space.task.recomputations.values[candidate.recompute].is_partial:
        return [candidate]
    return [candidate._replace(first=first) for first in range(1, len(space.task.inner))]


def exhaustive(space: Space, capacity_bytes: float) -> list[Estimate]:
    """Every candidate that fits, best first."""
    evaluator, found = Evaluator(space.task), list[Estimate]()
    for candidate in candidates(space):
        with suppress(PlanError):  # numbers that its schedule does not take
            if evaluator.needed_bytes(candidate) <= capacity_bytes:
                found.append(evaluator.played(candidate))
    return ranked(found)


WORST = 0.02  # part by which the plan found may be slower than the best


def check_search(task: Task, axes: tuple[str, ...]) -> list[Estimate]:
    """The search finds a plan that is nearly as fast as the best, also where memory rules the best out.

    Returns every candidate, best first.
    """
    space, evaluator = Space(task=task, axes=axes), Evaluator(task)
    everything = exhaustive(space, math.inf)
    needs = sorted(each.needed_bytes for each in everything)
    for share in (1.0, 0.1):
        capacity = needs[int(share * (len(needs) - 1))]
        best_s = min(each.step_s for each in everything if each.needed_bytes <= capacity)
        found = Search(space, evaluator, capacity).run(FINALISTS, MOST_PLAYED)
        assert min(each.step_s for each in found.best) <= (1 + WORST) * best_s
        assert all(each.needed_bytes <= capacity for each in found.best)
    return everything
