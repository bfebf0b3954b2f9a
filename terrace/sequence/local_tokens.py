"""Which tokens a member holds between attention: equally many, as near as can be to where they are attended to.

Places attend to different numbers of tokens, and every place holds at most `room`. However tokens are held, at least
(attended in a unit) - (room in the unit) leave that unit; matched from the innermost tier outwards, exactly so many do,
for the units of all tiers at once. So no layout has fewer tokens cross any tier from nodes outwards, and none costs
less under a cost that rises with the tier crossed.

A *node* is a unit of the innermost tier that joins places. Its places take equal shares of what leaves and of what
enters it, so that the links of all of them carry that (the routing of Zeppelin, 2509.21841); the rest is evened out
inside. That may take more tokens over the fast links inside than would otherwise go there, never over others.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from terrace.base.errors import PlanError
from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run, cut_runs, merged_runs, num_rows

Move = tuple[int, int, int]  # from a place that attends, to a place that holds, so many tokens


def deal_local_tokens(
    segments: Sequence[Segment], ring_degrees: Sequence[int], ulysses: int, num_local_tokens: int
) -> tuple[tuple[Run, ...], ...]:
    """Return the tokens that every member of the pool holds, `num_local_tokens` at most; member place * ulysses + part.

    What a place holds is dealt to its parts in equal runs, padding on the last ones. Raises `PlanError` when there are
    more tokens than rows.
    """
    num_ring_ranks, room = math.prod(ring_degrees), ulysses * num_local_tokens
    attended: list[list[Run]] = [[] for _ in range(num_ring_ranks)]
    for segment in segments:
        for index, ring_rank in enumerate(segment.ring_ranks):
            attended[ring_rank] += segment.shard(index)
    rest = [num_rows(tuple(runs)) for runs in attended]  # not given away; the last ones go first
    held: list[list[Run]] = [[] for _ in attended]
    for source, to, number in moves(tuple(rest), ring_degrees, room):
        held[to] += cut_runs(attended[source], rest[source] - number, rest[source])
        rest[source] -= number
    for ring_rank, runs in enumerate(attended):
        held[ring_rank] += cut_runs(runs, 0, rest[ring_rank])
    members: list[tuple[Run, ...]] = []
    for runs in held:
        rising = merged_runs(sorted(runs))
        members += (
            cut_runs(rising, ulysses_rank * num_local_tokens, (ulysses_rank + 1) * num_local_tokens)
            for ulysses_rank in range(ulysses)
        )
    return tuple(members)


def moves(attended: Sequence[int], ring_degrees: Sequence[int], room: int) -> tuple[Move, ...]:
    """Return which tokens are held elsewhere than attended to, when places attend to so many and hold at most `room`.

    Raises `PlanError` when there are more tokens than room.
    """
    if sum(attended) > room * len(attended):
        raise PlanError(
            f"{sum(attended)} tokens do not fit on {len(attended)} places that hold {room} each: "
            "lower the tokens of a micro-batch"
        )
    size = next((degree for degree in ring_degrees if degree > 1), 1)
    nodes = [range(first, first + size) for first in range(0, len(attended), size)]
    totals = [sum(attended[node.start : node.stop]) for node in nodes]
    outer = list(ring_degrees)
    if size > 1:
        outer[outer.index(size)] = 1
    between = _nested(totals, outer, room * size)
    leaves, enters = [0] * len(nodes), [0] * len(nodes)
    for source, to, number in between:
        leaves[source] += number
        enters[to] += number
    found: list[Move] = []
    outgoing: list[list[list[int]]] = []  # by node: [place, tokens] yet to be sent
    incoming: list[list[list[int]]] = []
    for node, gone, come in zip(nodes, leaves, enters, strict=True):
        out = _even([attended[ring_rank] for ring_rank in node], gone)
        into = _even([room] * size, come)
        outgoing.append([[ring_rank, number] for ring_rank, number in zip(node, out, strict=True)])
        incoming.append([[ring_rank, number] for ring_rank, number in zip(node, into, strict=True)])
        own = [attended[ring_rank] - less for ring_rank, less in zip(node, out, strict=True)]
        surplus = [max(0, number + more - room) for number, more in zip(own, into, strict=True)]
        lacking = [max(0, room - number - more) for number, more in zip(own, into, strict=True)]
        found += (
            (node.start + source, node.start + to, number)
            for source, to, number in _paired(_level(surplus, sum(surplus)), _level(lacking, sum(surplus)))
        )
    for source, to, number in between:
        found += _paired(_drawn(outgoing[source], number), _drawn(incoming[to], number))
    return tuple(found)


def _nested(counts: Sequence[int], degrees: Sequence[int], room: int) -> list[Move]:
    """Return moves of what is more than `room` to where there is less, inside the innermost units that have both."""
    surplus = [max(0, count - room) for count in counts]
    lacking = [max(0, room - count) for count in counts]
    found: list[Move] = []
    for size in accumulate(degrees, lambda inside, degree: inside * degree):
        for first in range(0, len(counts), size):
            unit = slice(first, first + size)
            matched = min(sum(surplus[unit]), sum(lacking[unit]))
            if matched:
                gives, takes = _level(surplus[unit], matched), _level(lacking[unit], matched)
                for amounts, taken in ((surplus, gives), (lacking, takes)):
                    for at, number in taken:
                        amounts[first + at] -= number
                found += ((first + source, first + to, number) for source, to, number in _paired(gives, takes))
    return found


def _even(most: Sequence[int], number: int) -> list[int]:
    """Return amounts that are `number` together, as even as can be where each is at most so much."""
    amounts = [0] * len(most)
    for done, at in enumerate(sorted(range(len(most)), key=most.__getitem__)):
        amounts[at] = min(most[at], number // (len(most) - done))
        number -= amounts[at]
    assert number == 0, f"{number} more than there is room for"
    return amounts


def _level(amounts: Sequence[int], number: int) -> list[tuple[int, int]]:
    """Return (index, part) of amounts, `number` together, so that what is left of them is as even as can be."""
    left = _even(amounts, sum(amounts) - number)
    taken = (amount - stays for amount, stays in zip(amounts, left, strict=True))
    return [(at, number) for at, number in enumerate(taken) if number]


def _drawn(waiting: list[list[int]], number: int) -> list[tuple[int, int]]:
    """Take (place, tokens) from the front of a list, `number` together."""
    drawn = []
    while number:
        ring_rank, there = waiting[0]
        taken = min(there, number)
        if taken:
            drawn.append((ring_rank, taken))
        number -= taken
        waiting[0][1] -= taken
        if not waiting[0][1]:
            del waiting[0]
    return drawn


def _paired(sources: Sequence[tuple[int, int]], sinks: Sequence[tuple[int, int]]) -> Iterator[Move]:
    """Yield moves between two lists of as many tokens, one after the other on both sides."""
    waiting = iter(sinks)
    to, room = 0, 0
    for source, number in sources:
        while number:
            if not room:
                to, room = next(waiting)
            moved = min(number, room)
            yield source, to, moved
            number, room = number - moved, room - moved
