"""Distributes local tokens evenly over members, as close as possible to the ranks that attend to them.

Ring ranks attend to different numbers of tokens, and each holds at most `room`. In any layout, at least (attended in a
unit) - (room in the unit) tokens must leave that unit. Matching surplus and room from the innermost tier outward
reaches this minimum for the units of all tiers at once. So no layout moves fewer tokens across any tier outside nodes,
and none is cheaper under a cost that grows with the tier crossed.

A *node* is a unit of the innermost tier that joins ring ranks. Its ranks take equal shares of the tokens that leave and
enter it, so that all their links share the load (the routing of Zeppelin, 2509.21841); the rest is balanced inside the
node. This may move more tokens over the fast links inside nodes, but not over others.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate

from terrace.base.errors import PlanError
from terrace.sequence.segments import Segment
from terrace.sequence.token_layout import Run, cut_runs, merged_runs, num_rows

Move = tuple[int, int, int]  # (ring rank that attends, ring rank that holds, tokens)


def deal_local_tokens(
    segments: Sequence[Segment], ring_degrees: Sequence[int], ulysses: int, num_local_tokens: int
) -> tuple[tuple[Run, ...], ...]:
    """Local tokens of every member (ring_rank * ulysses + ulysses_rank), at most `num_local_tokens` each.

    The tokens of a ring rank are split among its Ulysses ranks in equal runs, with padding on the last ones. Raises
    `PlanError` if there are more tokens than rows.
    """
    num_ring_ranks, room = math.prod(ring_degrees), ulysses * num_local_tokens
    attended: list[list[Run]] = [[] for _ in range(num_ring_ranks)]
    for segment in segments:
        for index, ring_rank in enumerate(segment.ring_ranks):
            attended[ring_rank] += segment.shard(index)
    rest = [num_rows(tuple(runs)) for runs in attended]  # tokens not moved yet; the last ones move first
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
    """Moves of tokens to ring ranks other than those that attend to them, such that each holds at most `room`.

    Raises `PlanError` if there are more tokens than room.
    """
    if sum(attended) > room * len(attended):
        raise PlanError(
            f"{sum(attended)} tokens do not fit on {len(attended)} ring ranks that hold {room} each: "
            "lower the tokens of a micro-batch"
        )
    # First between nodes, as if each node were one rank with the room of all its ranks.
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
    outgoing: list[list[list[int]]] = []  # by node: [ring rank, tokens] still to send
    incoming: list[list[list[int]]] = []
    # Then inside each node, after its ranks have taken equal shares of the traffic between nodes.
    for node, num_out, num_in in zip(nodes, leaves, enters, strict=True):
        out = _even([attended[ring_rank] for ring_rank in node], num_out)
        into = _even([room] * size, num_in)
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
    surplus = [max(0, count - room) for count in counts]
    lacking = [max(0, room - count) for count in counts]
    found: list[Move] = []
    # The innermost unit that has both surplus and room matches them; only the rest is left to the next tier.
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
    # Water filling: amounts as equal as possible, each at most `most`, that sum to `number`.
    amounts = [0] * len(most)
    for done, at in enumerate(sorted(range(len(most)), key=most.__getitem__)):
        amounts[at] = min(most[at], number // (len(most) - done))
        number -= amounts[at]
    assert number == 0, f"{number} more than there is room for"
    return amounts


def _level(amounts: Sequence[int], number: int) -> list[tuple[int, int]]:
    # Takes `number` in all, so that the remaining amounts are as equal as possible.
    left = _even(amounts, sum(amounts) - number)
    taken = (amount - kept for amount, kept in zip(amounts, left, strict=True))
    return [(at, number) for at, number in enumerate(taken) if number]


def _drawn(waiting: list[list[int]], number: int) -> list[tuple[int, int]]:
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
    waiting = iter(sinks)
    to, room = 0, 0
    for source, number in sources:
        while number:
            if not room:
                to, room = next(waiting)
            moved = min(number, room)
            yield source, to, moved
            number, room = number - moved, room - moved
