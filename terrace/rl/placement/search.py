"""The fastest placement of roles on a cluster: HybridFlow's algorithm 1 (Sheng et al. 2409.19256, section 6).

1. Every partition of the roles into pools (`partitions`).
2. For each pool, the fewest devices with the memory for its roles' states.
3. Every allocation of the devices to the pools with at least these numbers (`_Sharing`).
4. For each pool, the plans of its roles (`Choices`), cached per role and number of devices. Of their combinations that
   fit together only those are kept that no other beats in generation, scores and training at once.
5. An iteration takes, with the seconds of the slowest pool in each stage, the reshard and `Dataflow.iteration_s` of the
   others. A generator that runs ahead has a pool to itself.

Before any plan is searched, pools have bounds on their seconds. Pools are skipped if their bounds exceed the `count`
best partitions so far, or if they leave the others too few devices to be faster. So these partitions, each with its
best allocation and plans, are exact among the plans of step 4, without storing allocations;
tests/rl/test_roles_search.py compares them with pricing everything.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.rl.placement.between_pools import between_pools
from terrace.rl.placement.choices import Choices, undominated
from terrace.rl.placement.costs import Cost, Costs, tensors_bytes
from terrace.rl.placement.dataflow import Dataflow, Role, names_of
from terrace.rl.placement.generation import Generation, rows_of
from terrace.rl.placement.placement import (
    IterationReport,
    PlacedRole,
    Pool,
    RolePlacement,
    price,
)
from terrace.rl.placement.pools import first_ranks, partitions, pool_cluster, pool_sizes

Seconds = tuple[float, float, float]  # of generation, scores and training
Roles = tuple[int, ...]  # indexes of the roles of a pool, ascending
_EXCESS, _MOST_EXCESS = 0.02, 16.0  # of the first limit over the bound on all ways, and of the last; guesses
MOST_TRIED = 1_000_000  # placements, whole or in part, after which a search gives up: minutes


@dataclass(frozen=True, kw_only=True, eq=False)
class _Together:
    """Plans of roles that share a pool: seconds of scoring and training, bytes held and working, in role order."""

    costs: tuple[Cost | None, ...] = ()
    prepare_s: float = 0.0
    train_s: float = 0.0
    held_bytes: int = 0
    working_bytes: int = 0

    def joined(self, cost: Cost | None) -> "_Together":
        if cost is None:
            return replace(self, costs=(*self.costs, None))
        return _Together(
            costs=(*self.costs, cost),
            prepare_s=self.prepare_s + cost.score_s,
            train_s=self.train_s + cost.train_s,
            held_bytes=self.held_bytes + cost.held_bytes,
            working_bytes=max(self.working_bytes, cost.working_bytes),
        )

    @property
    def ways(self) -> tuple[float, float, int, int]:
        return self.prepare_s, self.train_s, self.held_bytes, self.working_bytes


@dataclass(frozen=True, kw_only=True, eq=False)
class Option:
    """A pool with its plans: seconds by stage; generation includes a hand-over inside the pool."""

    pool: Pool
    generate_s: float
    prepare_s: float
    train_s: float

    @property
    def seconds(self) -> Seconds:
        return self.generate_s, self.prepare_s, self.train_s

    @cached_property
    def rows(self) -> int:
        """Tensor ranks of a replica; 0 if nothing is generated."""
        return sum(role.rows for role in self.pool.roles)


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A placement and its price."""

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


class Places:
    """The options of pools of one dataflow on one cluster."""

    def __init__(self, dataflow: Dataflow, cluster: Cluster) -> None:
        self.dataflow, self.cluster = dataflow, cluster
        self.costs = Costs(dataflow)
        self.choices = Choices(self.costs)
        self._options: dict[tuple[Roles, int], tuple[Option, ...]] = {}
        self._least_seconds: dict[tuple[Roles, int], Seconds] = {}
        self._together: dict[tuple[Roles, int], list[_Together]] = {}

    def least(self, roles: Roles) -> int | None:
        """Fewest devices with the memory for the states of these roles; None if no pool size has it."""
        states = sum(self.choices.least_bytes(self.dataflow.roles[index]) for index in roles)
        sizes = pool_sizes(self.cluster)
        return next((size for size in sizes if states <= size * tensors_bytes(self.cluster)), None)

    def least_seconds(self, roles: Roles, size: int) -> Seconds:
        """Lower bounds on seconds of generation, scoring and training of a pool of this size with these roles."""
        key = roles, size
        if key not in self._least_seconds:
            here, members = pool_cluster(self.cluster, size), [self.dataflow.roles[index] for index in roles]
            each = [self.choices.least_seconds(role, here) for role in members]
            states = sum(self.choices.least_bytes(role) for role in members)
            generate_s = 0.0
            if any(role.generates for role in members):
                room = tensors_bytes(here) - states / size
                fitting = [found.seconds for found, _ in self._all_generations(here, room)]
                generate_s = min(fitting, default=math.inf)
            self._least_seconds[key] = generate_s, sum(score for score, _ in each), sum(train for _, train in each)
        return self._least_seconds[key]

    def options(self, roles: Roles, size: int) -> tuple[Option, ...]:
        """Pools of `size` devices with the roles, none of them dominated by another in all stages."""
        key = roles, size
        if key not in self._options:
            found = tuple(undominated(self._all_options(roles, size), _ways))
            self._options[key] = found
            # Tighten the bound to these plans.
            each = [option.seconds for option in found] or [(math.inf, math.inf, math.inf)]
            generate_s, prepare_s, train_s = map(min, zip(*each, strict=True))
            self._least_seconds[key] = generate_s, prepare_s, train_s
        return self._options[key]

    def _all_options(self, roles: Roles, size: int) -> Iterator[Option]:
        flow, here = self.dataflow, pool_cluster(self.cluster, size)
        room = tensors_bytes(here)
        members = [flow.roles[index] for index in roles]
        generates = any(role.generates for role in members)
        # The hand-over depends on the plan of the source, so its plans are not merged.
        apart = tuple(index for index in roles if generates and flow.roles[index] is flow.source)
        for first, rest in product(self._combined(apart, size), self._combined(_without(roles, apart), size)):
            both = [*zip(apart, first.costs, strict=True), *zip(_without(roles, apart), rest.costs, strict=True)]
            held, working = first.held_bytes + rest.held_bytes, max(first.working_bytes, rest.working_bytes)
            if held + working > room:
                continue
            known = dict(both)
            ways = self._generations(here, first.costs, room - held) if generates else [(0, 0.0)]
            for rows, generate_s in ways:
                placed = tuple(_placed(flow.roles[index], known.get(index), rows) for index in roles)
                yield Option(
                    pool=Pool(devices=size, roles=placed),
                    generate_s=generate_s,
                    prepare_s=first.prepare_s + rest.prepare_s,
                    train_s=first.train_s + rest.train_s,
                )

    def _generations(self, here: Cluster, source: Sequence[Cost | None], room: float) -> list[tuple[int, float]]:
        """(Rows, seconds) of replicas that fit in `room`; with a source in the pool, only the fastest."""
        fitting = sorted((each.seconds, rows) for each, rows in self._all_generations(here, room))
        if not source:
            return [(rows, seconds) for seconds, rows in fitting]
        best = list[tuple[int, float]]()
        for seconds, rows in fitting:
            # A hand-over takes at least 0 s.
            if best and seconds >= best[0][1]:
                break
            assert source[0] is not None
            seconds += self.costs.hand_over(here, source[0].plan, rows).seconds
            if not best or seconds < best[0][1]:
                best = [(rows, seconds)]
        return best

    def _all_generations(self, here: Cluster, room: float) -> list[tuple[Generation, int]]:
        ways = rows_of(here, self.dataflow.generator.model)
        found = [(self.costs.generation(here, rows, room), rows) for rows in ways]
        return [(each, rows) for each, rows in found if each.working_bytes <= room]

    def _combined(self, roles: Roles, size: int) -> list[_Together]:
        key = roles, size
        if key not in self._together:
            self._together[key] = self._joined(roles, size) if roles else [_Together()]
        return self._together[key]

    def _joined(self, roles: Roles, size: int) -> list[_Together]:
        role, here = self.dataflow.roles[roles[-1]], pool_cluster(self.cluster, size)
        before = self._combined(roles[:-1], size)
        room = tensors_bytes(here)
        choices = self.choices.of(role, here) if role.trains or role.scores else (None,)
        found = [each.joined(cost) for each in before for cost in choices]
        fitting = [each for each in found if each.held_bytes + each.working_bytes <= room]
        return undominated(fitting, lambda each: each.ways)


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
    cluster, found, num_tried = places.cluster, list[_Best](), 0
    for sets in among:
        least = [size for size in map(places.least, sets) if size is not None]
        if len(least) < len(sets) or sum(least) > cluster.world_size:
            continue
        limit_s = found[count - 1][0] if len(found) >= count else math.inf
        sharing = _Sharing(places, sets, least, num_tried)
        best = sharing.best(limit_s)
        num_tried = sharing.num_tried
        if best[1]:
            # Among equals the one with fewer pools comes first.
            found = sorted([*found, best], key=lambda each: each[0])
    if not found:
        raise PlanError(_no_room(places))
    placements = [RolePlacement(pools=tuple(option.pool for option in options)) for _, options in found[:count]]
    priced = [Placed(placement=each, report=price(places.dataflow, each, cluster, places.costs)) for each in placements]
    return FoundPlacements(best=tuple(priced), num_tried=num_tried)


_Best = tuple[float, list[Option]]


class _Sharing:
    """All allocations of the devices to the pools of one partition, in order of their bounds.

    Pools get their sizes one at a time, the slowest first. Under a time limit an unsized pool needs a minimum size,
    because
    its bounds decrease with its size; if these sizes exceed the cluster, the branch is cut. The limit starts slightly
    above
    a lower bound on all allocations and is raised until the best is below it, so few are stored and few plans searched.
    """

    def __init__(self, places: Places, sets: Sequence[Roles], least: Sequence[int], num_tried: int) -> None:
        world = places.cluster.world_size
        self.places, self.sizes, self.num_tried = places, pool_sizes(places.cluster), num_tried
        self.total_s = places.dataflow.iteration_s
        self.order = sorted(range(len(sets)), key=lambda index: -sum(places.least_seconds(sets[index], world)))
        self.sets = [sets[index] for index in self.order]
        self.least = [least[index] for index in self.order]

    def best(self, limit_s: float) -> _Best:
        """The fastest allocation below `limit_s`; no options if there is none."""
        best: _Best = limit_s, []
        excess, before_s = _EXCESS, 0.0
        while True:
            self.floors = [self._floors(at) for at in range(len(self.sets))]
            root_s = self.total_s(*map(max, zip(*(floors[-1] for floors in self.floors), strict=True)))
            self.limit_s = min(best[0], root_s * (1 + excess) if excess < _MOST_EXCESS else math.inf)
            whole = self._sized((), self.places.cluster.world_size, (0.0, 0.0, 0.0))
            for bound_s, sizes in sorted(each for each in whole if each[0] >= before_s):
                if bound_s >= best[0]:
                    break
                best = self._opened(sizes, best)
            if self.limit_s >= best[0]:
                return best
            excess, before_s = 2 * excess, self.limit_s

    def _sized(self, chosen: tuple[int, ...], left: int, slowest: Seconds) -> Iterator[tuple[float, tuple[int, ...]]]:
        """(Bound, sizes) of allocations that begin with `chosen` and may stay below the limit."""
        self.num_tried += 1
        if self.num_tried > MOST_TRIED:
            raise PlanError(_too_many(self.places))
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
            seconds = total_s(*slowest) + _between(places, firsts, chosen)
            if seconds < found[0]:
                found = seconds, chosen
            return
        for option in places.options(sets[len(chosen)], sizes[len(chosen)]):
            extend([*chosen, option], tuple(map(max, slowest, option.seconds)))

    extend([], (0.0, 0.0, 0.0))
    return found


def _between(places: Places, firsts: Sequence[int], chosen: Sequence[Option]) -> float:
    """Seconds of the hand-over between pools that begin at `firsts`; 0 inside a pool (its options include it)."""
    flow, names = places.dataflow, [{role.name for role in option.pool.roles} for option in chosen]
    source, target = (
        next(index for index, own in enumerate(names) if role.name in own) for role in (flow.source, flow.generator)
    )
    if source == target:
        return 0.0
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


def _placed(role: Role, cost: Cost | None, rows: int) -> PlacedRole:
    return PlacedRole(name=role.name, plan=None if cost is None else cost.plan, rows=rows if role.generates else 0)


def _without(roles: Roles, apart: Roles) -> Roles:
    return tuple(index for index in roles if index not in apart)


def _ways(option: Option) -> tuple[float, ...]:
    # Only replicas of equal rows compare: a hand-over between pools, which is not counted here, depends on them.
    return *option.seconds, option.rows, -option.rows
