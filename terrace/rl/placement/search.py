"""The fastest placement of roles on a cluster: HybridFlow's algorithm 1 (Sheng et al. 2409.19256, section 6).

1. Every partition of the roles into pools (`partitions`).
2. For each pool, the fewest devices with the memory for its roles' states.
3. Every allocation of the devices to the pools with at least these numbers (`_Sharing`).
4. For each pool, the plans of its roles (`Choices`), cached per role and number of devices. Of their combinations that
   fit together only those are kept that no other beats in generation, scores and training at once (`Places`).
5. An iteration takes, with the seconds of the slowest pool in each stage, the reshard and `Dataflow.iteration_s` of the
   others. A generator that runs ahead has a pool to itself.

Before any plan is searched, pools have bounds on their seconds. Partitions come in the order of their bounds. Pools are
skipped if their bounds exceed the `count` best partitions so far, or if they leave the others too few devices to be
faster; a hand-over is priced only if the placement is faster without it. So these partitions, each with its best
allocation and plans, are exact among the plans of step 4, without storing allocations; tests/rl/test_roles_search.py
compares them with pricing everything.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.rl.placement.between_pools import between_pools
from terrace.rl.placement.dataflow import Dataflow, names_of
from terrace.rl.placement.placement import IterationReport, RolePlacement, price
from terrace.rl.placement.places import Option, Places, Roles, Seconds
from terrace.rl.placement.pools import first_ranks, partitions, pool_cluster, pool_sizes

_EXCESS, _MOST_EXCESS = 0.02, 16.0  # of the first limit over the bound on all ways, and of the last; guesses
MOST_TRIED = 1_000_000  # placements, whole or in part, after which a search gives up: minutes


@dataclass(frozen=True, kw_only=True)
class Placed:
    placement: RolePlacement
    report: IterationReport

    @property
    def seconds(self) -> float:
        return self.report.seconds


@dataclass(frozen=True, kw_only=True)
class FoundPlacements:
    """The best placement of each of the best partitions, fastest first, and how many were tried in part or whole."""

    best: tuple[Placed, ...]
    num_tried: int


def find(dataflow: Dataflow, cluster: Cluster, count: int = 3) -> FoundPlacements:
    """The `count` best partitions of the roles, each with its best placement, fastest first.

    Raises `PlanError` if none fits.
    """
    among = partitions(len(dataflow.roles))
    if dataflow.ahead:
        alone = (dataflow.roles.index(dataflow.generator),)
        among = (sets for sets in among if alone in sets)
    return find_among(Places(dataflow, cluster), among, count)


def find_among(places: Places, among: Iterable[Sequence[Roles]], count: int) -> FoundPlacements:
    """`find` restricted to the partitions `among`, with the prices cached in `places`."""
    waiting, tried = list[tuple[float, int, _Sharing]](), _Tried(places)
    for number, sets in enumerate(among):
        least = [size for size in map(places.least, sets) if size is not None]
        if len(least) == len(sets) and sum(least) <= places.cluster.world_size:
            sharing = _Sharing(places, sets, least, tried)
            waiting.append((sharing.least_s(), number, sharing))
    heapify(waiting)
    found = list[tuple[float, int, list[Option]]]()
    # The partition with the lowest bound comes first, so that all others soon have a limit.
    limit_s = math.inf
    while waiting and waiting[0][0] < limit_s:
        _, number, sharing = heappop(waiting)
        if not sharing.is_sized:
            bound_s = sharing.raised_s(limit_s)
            if bound_s < limit_s:
                heappush(waiting, (bound_s, number, sharing))
            continue
        seconds, options = sharing.best(limit_s)
        if options:
            # Among equals the one with fewer pools comes first.
            found = sorted([*found, (seconds, number, options)], key=lambda each: each[:2])
            limit_s = found[count - 1][0] if len(found) >= count else math.inf
    if not found:
        raise PlanError(_no_room(places))
    placements = [RolePlacement(pools=tuple(option.pool for option in options)) for _, _, options in found[:count]]
    priced = [
        Placed(placement=each, report=price(places.dataflow, each, places.cluster, places.costs)) for each in placements
    ]
    return FoundPlacements(best=tuple(priced), num_tried=tried.num)


_Best = tuple[float, list[Option]]


class _Tried:
    """Placements that a search has tried, whole or in part."""

    def __init__(self, places: Places) -> None:
        self.places, self.num = places, 0

    def add(self) -> None:
        """Count one more. Raises `PlanError` for one too many."""
        self.num += 1
        if self.num > MOST_TRIED:
            raise PlanError(_too_many(self.places))


class _Sharing:
    """All allocations of the devices to the pools of one partition, in order of their bounds.

    Pools get their sizes one at a time, the slowest first. Under a time limit an unsized pool needs a minimum size,
    because its bounds decrease with its size; if these sizes exceed the cluster, the branch is cut. The limit starts
    slightly above a lower bound on all allocations and is raised until the best is below it, so few are stored and few
    plans searched. `is_sized` says whether some allocation was below the limit.
    """

    def __init__(self, places: Places, sets: Sequence[Roles], least: Sequence[int], tried: _Tried) -> None:
        world = places.cluster.world_size
        self.places, self.sizes, self.tried = places, pool_sizes(places.cluster), tried
        self.total_s = places.dataflow.iteration_s
        self.order = sorted(range(len(sets)), key=lambda index: -sum(places.least_seconds(sets[index], world)))
        self.sets = [sets[index] for index in self.order]
        self.least = [least[index] for index in self.order]
        self.excess, self.is_sized = _EXCESS, False

    def least_s(self) -> float:
        """A lower bound on all allocations, as if each pool had all devices that the others can spare."""
        self.floors = [self._floors(at) for at in range(len(self.sets))]
        return self.total_s(*map(max, zip(*(floors[-1] for floors in self.floors), strict=True)))

    def raised_s(self, limit_s: float) -> float:
        """A higher bound, that of an allocation if `is_sized`; at least `limit_s` if none is below this limit."""
        bounds = [bound_s for bound_s, _ in self._within(limit_s)]
        self.is_sized = bool(bounds)
        self.excess *= 1 if bounds else 2
        return min(bounds, default=self.limit_s)

    def best(self, limit_s: float) -> _Best:
        """The fastest allocation below `limit_s`; no options if there is none."""
        best: _Best = limit_s, []
        before_s = 0.0
        while True:
            for bound_s, sizes in sorted(each for each in self._within(best[0]) if each[0] >= before_s):
                if bound_s >= best[0]:
                    break
                best = self._opened(sizes, best)
            if self.limit_s >= best[0]:
                return best
            self.excess, before_s = 2 * self.excess, self.limit_s

    def _within(self, most_s: float) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(Bound, sizes) of allocations with bounds below `most_s`, and above `least_s` by at most its `excess`."""
        least_s = self.least_s()
        self.limit_s = min(most_s, least_s * (1 + self.excess) if self.excess < _MOST_EXCESS else math.inf)
        return self._sized((), self.places.cluster.world_size, (0.0, 0.0, 0.0))

    def _sized(self, chosen: tuple[int, ...], left: int, slowest: Seconds) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(Bound, sizes) of allocations that begin with `chosen` and may stay below the limit."""
        self.tried.add()
        at = len(chosen)
        if at == len(self.sets):
            yield self.total_s(*slowest), chosen
            return
        needed = [self._needed(each, slowest) for each in range(at, len(self.sets))]
        # All devices are allocated, so the last pool gets the rest.
        first, last = (left, left) if at == len(self.sets) - 1 else (0, left - sum(needed[1:]))
        for size in self.sizes:
            if max(first, needed[0]) <= size <= last:
                found = _slower(slowest, self.places.least_seconds(self.sets[at], size))
                if self.total_s(*found) < self.limit_s:
                    yield from self._sized((*chosen, size), left - size, found)

    def _opened(self, chosen: Sequence[int], best: _Best) -> _Best:
        sizes = [chosen[self.order.index(index)] for index in range(len(chosen))]
        sets = [self.sets[self.order.index(index)] for index in range(len(chosen))]
        firsts = first_ranks(self.places.cluster, tuple(sizes))
        return best if firsts is None else _best(self.places, sets, sizes, firsts, best)

    def _floors(self, at: int) -> list[Seconds]:
        """For each pool size, lower bounds over pools of at most this size."""
        room = self.places.cluster.world_size - sum(self.least) + self.least[at]
        found, lowest = list[Seconds](), (math.inf, math.inf, math.inf)
        for size in self.sizes:
            if self.least[at] <= size <= room:
                generate_s, prepare_s, train_s = self.places.least_seconds(self.sets[at], size)
                lowest = min(lowest[0], generate_s), min(lowest[1], prepare_s), min(lowest[2], train_s)
            found.append(lowest)
        return found

    def _needed(self, at: int, slowest: Seconds) -> float:
        """The smallest pool size with which all pools may finish within the limit."""
        floors = self.floors[at]
        index = bisect_left(floors, True, key=lambda floor: self.total_s(*map(max, slowest, floor)) < self.limit_s)
        return self.sizes[index] if index < len(floors) else math.inf


def _slower(first: Seconds, second: Seconds) -> Seconds:
    return max(first[0], second[0]), max(first[1], second[1]), max(first[2], second[2])


def _best(places: Places, sets: Sequence[Roles], sizes: Sequence[int], firsts: Sequence[int], best: _Best) -> _Best:
    """The better of `best` and the fastest options of the pools, which are added one at a time while they can
    improve it.
    """
    total_s = places.dataflow.iteration_s
    found, bounds = best, [places.least_seconds(*each) for each in zip(sets, sizes, strict=True)]

    def extend(chosen: list[Option], slowest: Sequence[float]) -> None:
        nonlocal found
        least = bounds[len(chosen) :]
        if total_s(*map(max, zip(slowest, *least, strict=True))) >= found[0]:
            return
        if not least:
            seconds = total_s(*slowest) + _handed_over_s(places, firsts, chosen)
            if seconds < found[0]:
                found = seconds, chosen
            return
        for option in places.options(sets[len(chosen)], sizes[len(chosen)]):
            extend([*chosen, option], tuple(map(max, slowest, option.seconds)))

    extend([], (0.0, 0.0, 0.0))
    return found


def _handed_over_s(places: Places, firsts: Sequence[int], chosen: Sequence[Option]) -> float:
    """Seconds of the hand-over, inside a pool or between two that begin at `firsts`."""
    flow, names = places.dataflow, [{role.name for role in option.pool.roles} for option in chosen]
    source, target = (
        next(index for index, own in enumerate(names) if role.name in own) for role in (flow.source, flow.generator)
    )
    own = chosen[source]
    if own.source is not None:
        return places.costs.hand_over(pool_cluster(places.cluster, own.pool.devices), own.source, own.rows).seconds
    spans = [(firsts[index], chosen[index].pool.devices) for index in (source, target)]
    return between_pools(places.cluster, spans[0], spans[1], chosen[target].rows, flow).seconds


def _too_many(places: Places) -> str:
    flow, cluster = places.dataflow, places.cluster
    return (
        f"the roles {names_of(flow.roles)} have more than {MOST_TRIED:,} placements that may be the fastest on the "
        f"{cluster.world_size} devices of cluster {cluster.name!r}: search fewer devices or fewer roles"
    )


def _no_room(places: Places) -> str:
    flow, cluster = places.dataflow, places.cluster
    for index, role in enumerate(flow.roles):
        if not places.options((index,), cluster.world_size):
            return (
                f"role {role.name!r} has no room on the {cluster.world_size} devices of cluster {cluster.name!r}, even "
                "alone: use more devices, shorter responses or a smaller model"
            )
    return (
        f"the roles {names_of(flow.roles)} have no room on the {cluster.world_size} devices of cluster "
        f"{cluster.name!r} together: use more devices, shorter responses or smaller models"
    )
