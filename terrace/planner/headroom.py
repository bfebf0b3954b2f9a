"""The fastest plan for each part of a device's memory that stays free."""

from collections.abc import Sequence

from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.verdicts import Headroom

_FINALISTS = 2  # played as programs: their order may differ from the search's, and more would double the time
PARTS = (0.0, 0.1, 0.2, 0.4)  # of the memory, that stay free


def headrooms(
    space: Space, evaluator: Evaluator, best: Estimate, limit: int, parts: Sequence[float] = PARTS
) -> list[Headroom]:
    """The fastest plans for `parts`, in ascending order; `best` is the fastest of the space, as `find` ranks it.

    Arguments as for `find`. A plan that leaves more free than is asked for serves until too little is left.
    """
    capacity, last = space.task.cluster.device.memory_bytes, Headroom(free=0.0, best=best)
    found = []
    for free in parts:
        most = (1 - free) * capacity
        if last.best is not None and last.best.needed_bytes > most:
            searched, _ = find(space, _FINALISTS, limit, evaluator, most)
            # Memory may grow a little with the split of blocks that is played.
            fitting = [each for each in searched.best if each.needed_bytes <= most]
            last = Headroom(free=free, best=fitting[0] if fitting else None, proved=searched.proved)
        found.append(Headroom(free=free, best=last.best, proved=last.proved))
    return found
