"""The fastest plan for each headroom: device memory that stays free (terrace.cluster.device).

Ties are settled as in the search (terrace.planner.ties), of which one rule prefers a plan that leaves a fifth of the
device. The fastest plans of a search often leave nothing: more memory saves a last bit of recomputation.
"""

from collections.abc import Sequence

from terrace.cluster.device import headroom_bytes
from terrace.plan.search_limits import FINALISTS, MOST_PLAYED
from terrace.planner.evaluate import Evaluator
from terrace.planner.ranking import Estimate
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.ties import AS_FULL, FULL, Ties, beyond_full, settle
from terrace.planner.verdicts import Headroom

WIDER = ("10%", "20%", "40%")


def settled(space: Space, evaluator: Evaluator, estimates: Sequence[Estimate], limit: int = MOST_PLAYED) -> Ties:
    """The ties among a search's best plans, of which there is one at least, and the first of a search for a fifth."""
    ties, most = settle(space.task, estimates), FULL * space.task.cluster.device.memory_bytes
    if beyond_full(space.task, ties.best[0]) <= AS_FULL:
        return ties
    searched, _ = find(space, FINALISTS, limit, evaluator, most)
    known = {each.candidate for each in estimates}
    roomy = settle(space.task, searched.best).best[:1] if searched.best else ()
    return settle(space.task, estimates, [each for each in roomy if each.candidate not in known])


def headrooms(
    space: Space, evaluator: Evaluator, best: Estimate, limit: int, wider: Sequence[str] = WIDER
) -> list[Headroom]:
    """The fastest plans for the device's own headroom (`best`), and for each of `wider` that is larger.

    `wider` ascends; arguments as for `find`. A plan that leaves more memory free than required is reused until it no
    longer does: it still ties with the fastest, since a smaller memory admits no faster plan.
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
            chosen = settle(space.task, searched.best).best[0] if searched.best else None
            last = Headroom(headroom=headroom, best=chosen, is_complete=searched.is_complete)
        found.append(Headroom(headroom=headroom, best=last.best, is_complete=last.is_complete))
    return found
