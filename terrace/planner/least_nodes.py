"""Searches for the fewest members of the outermost tier with which some plan of a space fits, size by size.

Sizes at which the states, sharded over all ranks, do not fit are skipped. At each other size the plans with the
smallest memory bounds are tried first, and a size at which one fits is searched as `terrace plan` would.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import count

from terrace.base.errors import PlanError, TerraceError
from terrace.planner.bound import Bounds
from terrace.planner.candidate import SLACK, PartialCandidate
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator
from terrace.planner.least_recomputation import recomputations
from terrace.planner.patience import ENDLESS, OutOfTimeError, Patience
from terrace.planner.ranking import Estimate
from terrace.planner.schedule_pins import schedules
from terrace.planner.search import Search, in_units, units_of
from terrace.planner.space import OpenMesh, Space, closed, micro_batches, open_meshes, placements
from terrace.planner.stages import SERIAL
from terrace.planner.task import Placement, Task
from terrace.planner.verdicts import runs_today

MAX_GROWTH = 64  # how many times as many members are thought of
_MOST_SIZES = 256  # looked at beyond the first that has room for the states


@dataclass(frozen=True, kw_only=True)
class LeastNodes:
    """Result of a search over sizes: no plan fits with fewer than `at_least` members.

    `task` has the fewest members with a known plan, `estimate`; None if there is none. It may have more than `at_least`
    if a search in between stopped at its limit. `last`: apart from `task`, no plan was found with up to this many
    members;
    `out_of_time` if the search stopped there by the clock.
    """

    at_least: int
    last: int
    task: Task | None = None
    estimate: Estimate | None = None
    out_of_time: bool = False


def least_nodes(space: Space, *, limit: int, grow_batch: bool = False, patience: Patience | None = None) -> LeastNodes:
    """The task with the fewest members, more than it has, and a plan that fits there.

    At most `limit` plans are evaluated per size. With `grow_batch` the batch at a size is the next multiple of its
    ranks;
    otherwise it is fixed.
    """
    # A new object instead of `ENDLESS`, since its words are changed here.
    task, patience = space.task, Patience() if patience is None else patience
    sizes = _sizes(task)
    left_open, last = 0, sizes.start - 1  # the first size whose search stopped at its limit; 0: none
    for size in sizes:
        patience.words = f"no plan fits; looking for the fewest members of {task.cluster.tiers[-1].name}: {size}"
        try:
            larger = replace(space, task=_resized(task, size, grow_batch))
        except TerraceError:  # a batch or a cluster beyond what is searched
            break
        try:
            found, proved = _fitting(larger, limit, patience)
        except OutOfTimeError:
            return LeastNodes(at_least=left_open or size, last=last, out_of_time=True)
        if found is not None:
            return LeastNodes(at_least=left_open or size, last=last, task=larger.task, estimate=found)
        left_open, last = left_open or (0 if proved else size), size
    return LeastNodes(at_least=left_open or last + 1, last=last)


def _resized(task: Task, size: int, grow_batch: bool) -> Task:
    cluster = task.cluster.resized(size)
    ranks = cluster.world_size
    batch = -(-task.batch // ranks) * ranks if grow_batch else task.batch
    return replace(task, cluster=cluster, batch=batch)


def _sizes(task: Task) -> range:
    # Larger clusters never hold more of the states on a rank, so the first with room for them is found by bisection.
    estimator, too_few = Estimator(task), task.cluster.tiers[-1].size
    most = enough = too_few * MAX_GROWTH
    if not _states_fit(estimator, most):
        return range(most + 1, most + 1)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        too_few, enough = (too_few, middle) if _states_fit(estimator, middle) else (middle, enough)
    return range(enough, min(most, enough + _MOST_SIZES) + 1)


def _states_fit(estimator: Estimator, size: int) -> bool:
    """Whether the states, sharded over all ranks, fit without anything else."""
    task = estimator.task
    ranks, outermost = task.cluster.resized(size).world_size, len(task.cluster.tiers) - 1
    degrees, everywhere = (*(1,) * outermost, ranks), Placement(outermost, outermost, outermost)
    numel = sum(block.num_trainable for block in task.blocks)
    least = estimator.whole_bytes(numel * estimator.state_bytes(degrees, everywhere)) * SLACK
    return least <= task.cluster.device.usable_bytes


def _fitting(space: Space, limit: int, patience: Patience) -> tuple[Estimate | None, bool]:
    """A plan that fits; if there is none, whether that is proved (not if the search stopped at its limit)."""
    evaluator, capacity = Evaluator(Bounds(Estimator(space.task))), space.task.cluster.device.usable_bytes
    fits = fits_somewhere(space, evaluator, capacity, limit, patience)
    if fits is False:
        return None, True
    # The advice must match a search with this many members, whose bounds may also prove that nothing fits.
    found = Search(space, evaluator, capacity).run(1, limit, patience)
    return (found.best[0] if found.best else None), found.proved and not fits


def fits_somewhere(
    space: Space, evaluator: Evaluator, capacity_bytes: float, limit: int, patience: Patience = ENDLESS
) -> bool | None:
    """Whether some plan of the space fits; plans with the smallest memory bounds are tried first, at most `limit`.

    None if none of these fits, but another plan may.
    """
    bounds, numbers = evaluator.bounds, count()
    # Memory bound, tie break, core, and, once it has a schedule, its placement and unit.
    heap: list[tuple[float, int, PartialCandidate, tuple[Placement, int] | None]] = []

    def push(core: PartialCandidate, choices: Iterable[tuple[Placement, int]], *, whole: bool) -> None:
        each = ((bounds.least_bytes(core, *choice), choice) for choice in choices)
        fitting = [(least, choice) for least, choice in each if least <= capacity_bytes]
        for least, choice in fitting if whole else sorted(fitting)[:1]:
            heappush(heap, (least, next(numbers), core, choice if whole else None))

    for shape in open_meshes(space):
        for micro_batch in micro_batches(space, shape.mesh.total("data")):
            patience.check()
            for again in recomputations(space, shape.mesh):
                outline = bounds.outline(shape, micro_batch, again)
                push(outline, ((place, 1) for place in placements(space, shape.mesh)), whole=False)
    tried = 0
    while heap and tried < limit:
        patience.check()
        _, _, core, choice = heappop(heap)
        if choice is not None:
            tried += 1
            with suppress(PlanError):
                candidate = core.candidate(*choice)
                if evaluator.needed_bytes(candidate) <= capacity_bytes and runs_today(space.task, candidate) is None:
                    return True
        elif core.shape.is_open or core.shape.divides:
            for mesh in closed(space, core.shape):
                outline = bounds.outline(OpenMesh(mesh), core.micro_batch, core.recompute)
                push(outline, ((place, 1) for place in placements(space, mesh)), whole=False)
        else:
            places = placements(space, core.shape.mesh)
            for staged in _staged(space, bounds, core):
                push(staged, ((place, unit) for place in places for unit in units_of(space, staged, place)), whole=True)
    return None if heap else False


def _staged(space: Space, bounds: Bounds, outline: PartialCandidate) -> Iterator[PartialCandidate]:
    root = bounds.bounded(outline)
    for name, chunks in schedules(space, root.sizes.num_stages):
        core = bounds.core(root, name, chunks)
        for each in () if core is None else in_units(space, core):
            with suppress(PlanError):  # the schedule cannot run these numbers
                yield each if name == SERIAL else bounds.staged(each)
