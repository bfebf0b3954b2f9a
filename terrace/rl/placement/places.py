"""Pools of a dataflow on a cluster: the combinations of plans with room on them, and bounds on their seconds."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.rl.placement.choices import Choices, undominated
from terrace.rl.placement.costs import Cost, Costs, tensors_bytes
from terrace.rl.placement.dataflow import Dataflow, Role
from terrace.rl.placement.generation import Generation, rows_of
from terrace.rl.placement.placement import PlacedRole, Pool
from terrace.rl.placement.pools import pool_cluster, pool_sizes

Seconds = tuple[float, float, float]  # of generation, scores and training
Roles = tuple[int, ...]  # indexes of the roles of a pool, ascending


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
    """A pool with its plans: seconds by stage; `source` is the plan that hands over inside the pool."""

    pool: Pool
    source: Plan | None
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


class Places:
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
            # Only options with the same hand-over compare: it is priced later, and only where it may matter.
            alike = dict[tuple[int, int], list[Option]]()
            for option in self._all_options(roles, size):
                alike.setdefault((id(option.source), option.rows), []).append(option)
            found = tuple(each for some in alike.values() for each in undominated(some, lambda one: one.seconds))
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
        # The hand-over depends on the plan of the source, so its plans are not merged with others.
        apart = tuple(index for index in roles if generates and flow.roles[index] is flow.source)
        for first, rest in product(self._combined(apart, size), self._combined(_without(roles, apart), size)):
            both = [*zip(apart, first.costs, strict=True), *zip(_without(roles, apart), rest.costs, strict=True)]
            held, working = first.held_bytes + rest.held_bytes, max(first.working_bytes, rest.working_bytes)
            if held + working > room:
                continue
            known = dict(both)
            source = first.costs[0].plan if first.costs and first.costs[0] else None
            ways = [(0, 0.0)]
            if generates:
                ways = [(rows, each.seconds) for each, rows in self._all_generations(here, room - held)]
            for rows, generate_s in ways:
                placed = tuple(_placed(flow.roles[index], known.get(index), rows) for index in roles)
                yield Option(
                    pool=Pool(devices=size, roles=placed),
                    source=source,
                    generate_s=generate_s,
                    prepare_s=first.prepare_s + rest.prepare_s,
                    train_s=first.train_s + rest.train_s,
                )

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


def _placed(role: Role, cost: Cost | None, rows: int) -> PlacedRole:
    return PlacedRole(name=role.name, plan=None if cost is None else cost.plan, rows=rows if role.generates else 0)


def _without(roles: Roles, apart: Roles) -> Roles:
    return tuple(index for index in roles if index not in apart)
