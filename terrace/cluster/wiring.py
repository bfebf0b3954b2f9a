"""Rings over the links of a node whose devices are wired in pairs, some with more links than others.

A collective library sends along rings that share no link, in both directions of each link. A ring visits each of n
members once, so its links are a Hamiltonian cycle, and it runs at the rate of one link: with k disjoint cycles a member
sends at the rate of 2 k links. Two members need no cycle and use all links between them. Members without a cycle reach
each other through other devices, which counts as one link.

RCCL's rings over the eight devices of a Frontier node (rome_models.cc, model 52) are the two cycles found here.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from math import gcd

Link = tuple[int, int, int]  # two devices, numbered within their tier's group, and the links between them
Pair = tuple[int, int]
_MOST_LINKS = 100  # per pair; devices have tens of links
_TRIES = 30  # random tries to find disjoint cycles greedily
# Limits of the searches, which take exponential time: path extensions, cycles, and choices of cycles.
_MOST_STEPS, _MOST_CYCLES, _MOST_CHOICES = 2_000, 3_000, 20_000


@lru_cache(maxsize=1024)
def num_links(links: tuple[Link, ...], group: tuple[int, ...]) -> int:
    """Number of links whose total rate a member of a group reaches while all members send."""
    left = {pair: number for *ends, number in links if set(pair := _pair(*ends)) <= set(group)}
    if len(group) == 2:
        return max(1, left.get(_pair(*group), 0))
    degrees = [sum(number for pair, number in left.items() if member in pair) for member in group]
    most = min(degrees) // 2
    alike = max(1, gcd(*left.values()))  # links that can be treated as one bundle
    found = alike * _one_by_one(group, {pair: number // alike for pair, number in left.items()}, most // alike)
    if found < most:
        found = max(found, _one_by_one(group, left, most))
    if found < most:
        cycles = list(islice(_cycles(group, left), _MOST_CYCLES))
        found = max(found, _disjoint(cycles, left, most))
    return max(1, 2 * found)


def by_degree(links: tuple[Link, ...], inner: int, size: int) -> tuple[int, ...]:
    """`num_links` for groups over 2, 3, ... `size` members; each member has `inner` devices, each in its own group.

    Members of a group are adjacent or equally spaced; the placement with the fewest links counts.
    """
    return tuple(
        min(
            num_links(links, tuple(inner * member + device for member in members))
            for members in _placements(degree, size)
            for device in range(inner)
        )
        for degree in range(2, size + 1)
    )


def wrong_links(tier: str, links: Sequence[Link], num_devices: int) -> str:
    """What is wrong with the links of a group of `num_devices` devices; "" if they are valid."""
    seen, wired = set[Pair](), set[int]()
    for one, other, number in links:
        if one == other or min(one, other) < 0 or number < 1:
            return (
                f"tiers.{tier}.links has {[one, other, number]}: give two devices, numbered from 0 within the tier's "
                "group, and how many links join them, at least 1"
            )
        if number > _MOST_LINKS:
            return f"tiers.{tier}.links has {[one, other, number]}: give at most {_MOST_LINKS} links of two devices"
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
    # Paths may use devices outside the group, which can be a part of a node.
    reached = _reached(0, seen)
    if links and (apart := sorted(set(range(num_devices)) - reached)):
        return f"tiers.{tier}.links has no way from device 0 to device {apart[0]}: add links between them"
    return ""


def _reached(first: int, pairs: set[Pair]) -> set[int]:
    found, last = {first}, set[int]()
    while found != last:
        last = set(found)
        found |= {device for pair in pairs if found & {*pair} for device in pair}
    return found


def _pair(one: int, other: int) -> Pair:
    return (one, other) if one < other else (other, one)


def _placements(degree: int, size: int) -> Iterator[range]:
    for apart in range(1, size // degree + 1):
        block = degree * apart
        if apart == 1 or size % block == 0:
            for first in range(size // block):
                for start in range(first * block, first * block + apart):
                    yield range(start, start + block, apart)


def _cycles(
    group: Sequence[int], left: Mapping[Pair, int], shuffled: random.Random | None = None
) -> Iterator[list[Pair]]:
    """Hamiltonian cycles of the members, each in one direction only; with `shuffled`, in random order."""
    steps = _MOST_STEPS if shuffled else _MOST_STEPS * _TRIES

    def longer(path: list[int]) -> Iterator[list[Pair]]:
        nonlocal steps
        if len(path) == len(group):
            # The other direction is the same cycle.
            if (shuffled or path[1] < path[-1]) and left.get(_pair(path[-1], path[0])):
                yield [_pair(one, other) for one, other in zip(path, [*path[1:], path[0]], strict=True)]
            return
        after = [member for member in group if member not in path and left.get(_pair(path[-1], member))]
        if shuffled:
            shuffled.shuffle(after)
        for member in after:
            if steps <= 0:
                return
            steps -= 1
            yield from longer([*path, member])

    yield from longer([group[0]])


def _one_by_one(group: Sequence[int], links: Mapping[Pair, int], most: int) -> int:
    """Number of disjoint cycles found greedily: each uses links that earlier ones leave; the best of `_TRIES`."""
    best, shuffled = 0, random.Random(0)  # the same cycles in every run
    for _ in range(_TRIES):
        left, found = dict(links), 0
        while found < most and (cycle := next(_cycles(group, left, shuffled), None)) is not None:
            for pair in cycle:
                left[pair] -= 1
            found += 1
        best = max(best, found)
        if best == most:
            break
    return best


def _disjoint(cycles: Sequence[list[Pair]], left: dict[Pair, int], most: int) -> int:
    choices = _MOST_CHOICES

    def chosen(first: int, most: int) -> int:
        nonlocal choices
        best = 0
        for index in range(first, len(cycles)):
            if best >= most or choices <= 0:
                break
            choices -= 1
            if all(left[pair] for pair in cycles[index]):
                for pair in cycles[index]:
                    left[pair] -= 1
                best = max(best, 1 + chosen(index, most - 1))
                for pair in cycles[index]:
                    left[pair] += 1
        return best

    return chosen(0, most)
