"""Lower bound of the makespan over all assignments of documents to groups of ring ranks.

Let w_j(g) be the seconds of document j on each of the |g| ranks of a group g with room for it, and P the number of ring
ranks. In an assignment with makespan t, every document runs on a group with w_j(g) <= t, and the total time, the sum of
|g| w_j(g), is at most P t. So t belongs to

    { t : every j has a group with w_j(g) <= t, and  sum over j of min { |g| w_j(g) : w_j(g) <= t }  <=  P t }

The left side falls with t and the right side rises, so the set is an interval without upper end; its least element is
the bound. It is at least the total work over P and at least the time of each document on its fastest group, and
accounts for narrow groups being too slow and wide ones wasteful (the argument for malleable jobs, Turek, Wolf and Yu
1992). It ignores that documents cannot be split freely to fill ranks.
"""

from collections import Counter
from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.sequence.candidate_rings import CandidateRings
from terrace.sequence.cost import WorkCost

_HALVINGS = 40


def makespan_bound_s(lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int) -> float:
    """Lower bound in seconds for any assignment of these documents; arguments as in `assign`.

    Raises `PlanError` if no group has room for a document.
    """
    rings = CandidateRings(tuple(ring_degrees), cost, capacity)
    low = (
        sum(map(cost.whole_s, lengths)) / rings.num_ring_ranks
    )  # a ring never takes less work in total than one ring rank
    choices = [(_choices(length, rings, low), count) for length, count in sorted(Counter(lengths).items())]
    low = max([low, *(each[-1][0] for each, _ in choices)])  # every sequence has a group
    if _is_possible(choices, low, rings.num_ring_ranks):
        return low
    high = 2 * low
    while not _is_possible(choices, high, rings.num_ring_ranks):
        low, high = high, 2 * high
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _is_possible(choices, middle, rings.num_ring_ranks):
            high = middle
        else:
            low = middle
    return low


_Choices = list[tuple[float, float]]


def _choices(length: int, rings: CandidateRings, least_s: float) -> _Choices:
    # (Seconds, total seconds of all ranks), by ascending total. Groups that are slower and cost more are dropped. If
    # one rank finishes within `least_s`, below which the bound cannot fall, it is the only choice.
    if rings.fits(length, 0) and rings.seconds(length, 0) <= least_s:
        return [(rings.seconds(length, 0),) * 2]
    found = []
    for index, shape in enumerate(rings.shapes):
        if rings.fits(length, index):
            seconds = rings.seconds(length, index)
            found.append((seconds * shape.num_ring_ranks, seconds))
    if not found:
        raise PlanError(
            f"a document of {length} tokens fits on none of {rings.num_ring_ranks} ring ranks of {rings.capacity} "
            "tokens: shorten it, add ranks to the context axis or give a ring rank more tokens"
        )
    kept: _Choices = []
    for total, seconds in sorted(found):
        if not kept or seconds < kept[-1][0]:
            kept.append((seconds, total))
    return kept


def _is_possible(choices: Sequence[tuple[_Choices, int]], seconds: float, num_ring_ranks: int) -> bool:
    total = 0.0
    for each, count in choices:
        total += count * next(work for alone, work in each if alone <= seconds)
    return total <= num_ring_ranks * seconds
