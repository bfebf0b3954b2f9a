"""The fastest plan for each headroom: memory of a device that stays free (terrace.cluster.headroom).

Ties are settled as those of the search are (terrace.planner.ties).
"""

from collections.abc import Sequence

from terrace.cluster.headroom import headroom_bytes
from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.ties import FINALISTS, settle
from terrace.planner.verdicts import Headroom

WIDER = ("10%", "20%", "40%")


def headrooms(
    space: Space, evaluator: Evaluator, best: Estimate, limit: int, wider: Sequence[str] = WIDER
) -> list[Headroom]:
    """The fastest plans for the device's own headroom, of which `best` is, and for each of `wider` that is larger.

    `wider` ascends; arguments as for `find`. A plan that leaves more free than is asked for serves until too little is
    left: it still ties with the fastest, since no plan that leaves more free is faster.
    """
    device = space.task.cluster.device
    memory_bytes = device.memory_bytes
    found = [Headroom(headroom=device.headroom, best=best)]
    for headroom in wider:
        most = memory_bytes - headroom_bytes(headroom, memory_bytes)
        if most >= device.usable_bytes:
            continue
        last = found[-1]
        if last.best is not None and last.best.needed_bytes > most:
            searched, _ = find(space, FINALISTS, limit, evaluator, most)
            # Memory may grow a little with the split of blocks that is played.
            fitting = [each for each in searched.best if each.needed_bytes <= most]
            chosen = settle(space.task, fitting).best[0] if fitting else None
            last = Headroom(headroom=headroom, best=chosen, proved=searched.proved)
        found.append(Headroom(headroom=headroom, best=last.best, proved=last.proved))
    return found
