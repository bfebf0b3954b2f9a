"""Rings over the links of a node whose devices are wired in pairs, some by more links than others.

A collective library sends along rings that share no link, in both directions of each link. A ring over n members passes
each once, so its links are a cycle through all of them, and it runs at the rate of one link: with k disjoint cycles a
member sends at the rate of 2 k links. Two members need no cycle, and send over all links between them. Members without
a cycle of their own reach one another through devices in between, which is taken for one link.

RCCL's rings over the eight devices of a node of Frontier (rome_models.cc, model 52) are the two cycles found here.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

Link = tuple[int, int, int]  # two devices, numbered within their tier's group, and the links between them
Pair = tuple[int, int]
_MOST_CYCLES = 10_000  # of many more there are enough without a common link among the first


@lru_cache(maxsize=1024)
def num_links(links: tuple[Link, ...], group: tuple[int, ...]) -> int:
    """The links at whose rate together a member of a group sends, while all members send."""
    left = {pair: number for *ends, number in links if set(pair := _pair(*ends)) <= set(group)}
    if len(group) == 2:
        return max(1, left.get(_pair(*group), 0))
    degrees = [sum(number for pair, number in left.items() if member in pair) for member in group]
    cycles: list[list[Pair]] = []
    for cycle in _cycles(group, left):
        cycles.append(cycle)
        if len(cycles) == _MOST_CYCLES:
            break
    return max(1, 2 * _disjoint(cycles, left, 0, min(degrees) // 2))


def by_degree(links: tuple[Link, ...], inner: int, size: int) -> tuple[int, ...]:
    """`num_links` of groups of 2, 3, ... `size` members with `inner` devices each, a group for each of these.

    Members of a group are neighbours or equally far apart; the placement with the fewest links counts.
    """
    return tuple(
        min(
            num_links(links, tuple(inner * member + device for member in members))
            for members in _placements(degree, size)
            for device in range(inner)
        )
        for degree in range(2, size + 1)
    )


def wrong_links(tier: str, links: Sequence[Link], num_devices: int) -> str | None:
    """What is wrong with links that no group of `num_devices` devices can have."""
    seen, wired = set[Pair](), set[int]()
    for one, other, number in links:
        if one == other or min(one, other) < 0 or number < 1:
            return (
                f"tiers.{tier}.links has {[one, other, number]}: give two devices, numbered from 0 within the tier's "
                "group, and how many links join them, at least 1"
            )
        if _pair(one, other) in seen:
            return f"tiers.{tier}.links has devices {one} and {other} twice: add their links up"
        seen.add(_pair(one, other))
        wired |= {one, other} if max(one, other) < num_devices else set()
    alone = sorted(set(range(num_devices)) - wired)
    if links and num_devices > 1 and alone:
        return (
            f"tiers.{tier}.links joins device {alone[0]} to no other of the {num_devices} in the tier's group: add its "
            "links, or leave links out"
        )
    return None


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _placements(degree: int, size: int) -> Iterator[range]:
    for apart in range(1, size // degree + 1):
        block = degree * apart
        if apart == 1 or size % block == 0:
            for first in range(size // block):
                for start in range(first * block, first * block + apart):
                    yield range(start, start + block, apart)


def _cycles(group: Sequence[int], left: Mapping[Pair, int]) -> Iterator[list[Pair]]:
    """Cycles through all members, each in one of its two directions."""

    def longer(path: list[int]) -> Iterator[list[Pair]]:
        if len(path) == len(group):
            # The other direction is the same cycle.
            if path[1] < path[-1] and _pair(path[-1], path[0]) in left:
                yield [_pair(one, other) for one, other in zip(path, [*path[1:], path[0]], strict=True)]
            return
        for member in group:
            if member not in path and _pair(path[-1], member) in left:
                yield from longer([*path, member])

    yield from longer([group[0]])


def _disjoint(cycles: Sequence[list[Pair]], left: dict[Pair, int], first: int, most: int) -> int:
    """The most cycles, of those from `first` on, that share no link; `most` is a bound."""
    best = 0
    for index in range(first, len(cycles)):
        if best >= most:
            break
        if all(left[pair] for pair in cycles[index]):
            for pair in cycles[index]:
                left[pair] -= 1
            best = max(best, 1 + _disjoint(cycles, left, index, most - 1))
            for pair in cycles[index]:
                left[pair] += 1
    return best
