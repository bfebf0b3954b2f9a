"""A lower bound of the makespan: no assignment of the sequences to groups of places ends sooner.

Let w_j(g) be the seconds that sequence j takes on each of the |g| places of a group g with room for it, P the places.
Take an assignment of makespan t. Every sequence is on a group with w_j(g) <= t, and the seconds of all places together
are the sum of |g| w_j(g); they are at most P t. So t is among the

    { t : every j has a group with w_j(g) <= t, and  sum over j of min { |g| w_j(g) : w_j(g) <= t }  <=  P t }

With t the left side falls and the right side rises, so this set is everything from its least element on: the bound. It
is at least the whole work over the places, and what each sequence takes on the group where it ends first; between, it
sees that narrow groups are too slow and wide ones wasteful. (The argument is that of malleable jobs on machines, Turek,
Wolf and Yu 1992.) What it does not see is that sequences of one place do not cut.
"""

from collections import Counter
from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.sequence.candidate_rings import CandidateRings
from terrace.sequence.cost import WorkCost

_HALVINGS = 40


def makespan_bound_s(lengths: Sequence[int], ring_degrees: Sequence[int], cost: WorkCost, capacity: int) -> float:
    """Return seconds that no assignment of these sequences is below; arguments are those of `assign`.

    Raises `PlanError` when a sequence has no group with room for it.
    """
    rings = CandidateRings(tuple(ring_degrees), cost, capacity)
    low = sum(map(cost.whole_s, lengths)) / rings.num_ring_ranks  # no group takes less of all places than one place
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
    """Return (seconds, seconds of all places) of the groups of a sequence, least of all places first.

    Those that take longer than one that costs less are left out, and all but one place where that ends by `least_s`.
    """
    if rings.fits(length, 0) and rings.seconds(length, 0) <= least_s:
        return [(rings.seconds(length, 0),) * 2]
    found = []
    for index, shape in enumerate(rings.shapes):
        if rings.fits(length, index):
            seconds = rings.seconds(length, index)
            found.append((seconds * shape.num_ring_ranks, seconds))
    if not found:
        raise PlanError(
            f"a document of {length} tokens fits on none of {rings.num_ring_ranks} places of {rings.capacity} tokens: "
            "shorten it, add ranks to the context axis or give a place more tokens"
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
