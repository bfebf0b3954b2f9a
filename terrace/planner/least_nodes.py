"""Searches for the fewest members of the outermost tier with which some plan of a space fits, size by size.

Sizes at which the states, sharded over all ranks, do not fit are skipped; each other size is searched as `terrace plan`
would.
"""

from dataclasses import dataclass, replace

from terrace.base.errors import TerraceError
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator
from terrace.planner.patience import OutOfTimeError, Patience
from terrace.planner.ranking import Estimate
from terrace.planner.search import Found, Search
from terrace.planner.space import Space
from terrace.planner.task import Placement, Task

MAX_GROWTH = 64  # how many times as many members are thought of
_MOST_SIZES = 256  # looked at beyond the first that has room for the states


@dataclass(frozen=True, kw_only=True)
class LeastNodes:
    """Result of a search over sizes: no plan fits with fewer than `at_least` members.

    `task` has the fewest members with a known plan, `estimate`; None if there is none. It may have more than `at_least`
    if a search in between stopped at its limit. `last`: apart from `task`, no plan was found with up to this many
    members; `out_of_time` if the search stopped there by the clock.
    """

    at_least: int
    last: int
    task: Task | None = None
    estimate: Estimate | None = None
    out_of_time: bool = False


def least_nodes(space: Space, *, limit: int, grow_batch: bool = False, patience: Patience | None = None) -> LeastNodes:
    """The task with the fewest members, more than it has, and a plan that fits there.

    A size is searched with `limit`, as `terrace plan` does. With `grow_batch` the batch at a size is the next multiple
    of its ranks; otherwise it is fixed.
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
            found = _fitting(larger, limit, patience)
        except OutOfTimeError:
            return LeastNodes(at_least=left_open or size, last=last, out_of_time=True)
        if found.best:
            return LeastNodes(at_least=left_open or size, last=last, task=larger.task, estimate=found.best[0])
        left_open, last = left_open or (0 if found.is_complete else size), size
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
    least = estimator.whole_bytes(numel * estimator.state_bytes(degrees, everywhere))
    return least <= task.cluster.device.usable_bytes


def _fitting(space: Space, limit: int, patience: Patience) -> Found:
    evaluator = Evaluator(space.task)
    return Search(space, evaluator, space.task.cluster.device.usable_bytes).run(1, limit, patience)
