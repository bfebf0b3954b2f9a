"""A placement of roles on pools, and the price of an iteration under it.

Pools run concurrently and the stages of a role sequentially, so with the seconds of every role

    iteration = reshard + sum over generate, prepare, train of max over pools of the sum over their roles

If the generator runs ahead (`Dataflow.ahead`), the sum is replaced by the larger of generate and prepare + train
(HybridFlow, Sheng et al. 2409.19256, section 6, algorithm 1). Roles of a pool share its devices: their held memory adds
up, but only the largest working memory counts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import Plan
from terrace.rl.placement.between_pools import between_pools
from terrace.rl.placement.costs import Costs, lost_bytes, tensors_bytes
from terrace.rl.placement.dataflow import GENERATE, PREPARE, RESHARD, TRAIN, Dataflow, Role
from terrace.rl.placement.generation import Generation
from terrace.rl.placement.pools import pool_cluster, side_by_side


@dataclass(frozen=True, kw_only=True)
class PlacedRole:
    """A role on its pool: its plan to train or score, and the tensor ranks of a replica that generates.

    `plan` is None for a role that only generates, `rows` is 0 for one that does not.
    """

    name: str
    plan: Plan | None = None
    rows: int = 0


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Neighbouring devices, and the roles that share them; `is_served`: those of servers beside the cluster."""

    devices: int
    roles: tuple[PlacedRole, ...]
    is_served: bool = False


@dataclass(frozen=True, kw_only=True)
class RolePlacement:
    """Every role of a dataflow on one pool. Pools are contiguous on the cluster, the largest first, servers last."""

    pools: tuple[Pool, ...]


@dataclass(frozen=True, kw_only=True)
class RoleReport:
    """A role: seconds by stage, bytes of its fullest rank; `generation` if it generates."""

    name: str
    pool: int
    seconds: Mapping[str, float]
    held_bytes: int = 0
    working_bytes: int = 0
    plan: Plan | None = None
    rows: int = 0
    generation: Generation | None = None


@dataclass(frozen=True, kw_only=True)
class PoolReport:
    """A pool: its first rank and devices, and the memory of its fullest rank next to that of a device."""

    first: int
    devices: int
    held_bytes: int
    working_bytes: int
    lost_bytes: int  # to the process and the allocator
    capacity_bytes: float
    is_served: bool = False

    @property
    def needed_bytes(self) -> int:
        return self.held_bytes + self.working_bytes + self.lost_bytes


@dataclass(frozen=True, kw_only=True)
class IterationReport:
    """A predicted iteration: `stages` has seconds by stage, each of the slowest pool."""

    stages: Mapping[str, float]
    roles: tuple[RoleReport, ...]
    pools: tuple[PoolReport, ...]
    dataflow: Dataflow
    sent_bytes: Mapping[str, int] = field(default_factory=dict)  # of the hand-over, by tier

    @property
    def tokens(self) -> int:
        return self.dataflow.tokens

    @cached_property
    def seconds(self) -> float:
        rest = (self.stages[stage] for stage in (GENERATE, PREPARE, TRAIN))
        return self.stages[RESHARD] + self.dataflow.iteration_s(*rest)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def fits(self) -> bool:
        return all(pool.needed_bytes <= pool.capacity_bytes for pool in self.pools)


def price(
    dataflow: Dataflow, placement: RolePlacement, cluster: Cluster, costs: Costs | None = None
) -> IterationReport:
    """The predicted iteration of a placement; one that does not fit is priced too.

    Raises `PlanError` for a placement that omits a role or cannot be laid out on the cluster, and for a plan that
    cannot run on its pool. `costs` is a cache of the dataflow's costs.
    """
    firsts = _checked(dataflow, placement, cluster)
    costs = costs or Costs(dataflow)
    roles, pools = list[RoleReport](), list[PoolReport]()
    for index, (pool, first) in enumerate(zip(placement.pools, firsts, strict=True)):
        here = _cluster_of(cluster, pool)
        own = [_report(costs, dataflow.role(placed.name), placed, index, here) for placed in pool.roles]
        held, room = sum(role.held_bytes for role in own), tensors_bytes(here)
        own = [_generating(costs, role, here, room - held) if role.rows else role for role in own]
        roles += own
        working = max(role.working_bytes for role in own)
        pools.append(
            PoolReport(
                first=first,
                devices=pool.devices,
                held_bytes=held,
                working_bytes=working,
                lost_bytes=lost_bytes(here, held + working),
                capacity_bytes=here.device.usable_bytes,
                is_served=pool.is_served,
            )
        )
    return _joined(dataflow, placement, cluster, costs, roles, pools)


def _checked(dataflow: Dataflow, placement: RolePlacement, cluster: Cluster) -> tuple[int, ...]:
    """The first rank of each pool."""
    placed = [role.name for pool in placement.pools for role in pool.roles]
    for role in dataflow.roles:
        if placed.count(role.name) != 1:
            raise PlanError(f"role {role.name!r} is on {placed.count(role.name)} pools: place it on one")
    for name in placed:
        dataflow.role(name)
    for pool in placement.pools:
        names = [role.name for role in pool.roles]
        if dataflow.ahead and dataflow.generator.name in names and len(names) > 1:
            raise PlanError(
                f"a pool has {', '.join(names)}, and {dataflow.generator.name!r} draws there while the others should "
                "learn: give it a pool of its own"
            )
        if not pool.roles:
            raise PlanError(f"a pool of {pool.devices} devices has no roles: leave it out, or place a role on it")
        _cluster_of(cluster, pool)
    own = [pool.devices for pool in placement.pools if not pool.is_served]
    return (*side_by_side(cluster, tuple(own)), *[0] * (len(placement.pools) - len(own)))


def _cluster_of(cluster: Cluster, pool: Pool) -> Cluster:
    """The cluster of a pool; of servers one of the same devices, those of a server on its innermost tier."""
    if not pool.is_served:
        return pool_cluster(cluster, pool.devices)
    rows = max(role.rows for role in pool.roles)
    inside = replace(cluster.tiers[0], size=rows)
    between = replace(cluster.tiers[-1], name="servers", size=pool.devices // rows)
    return replace(cluster, tiers=(inside, between))


def _report(costs: Costs, role: Role, placed: PlacedRole, pool: int, cluster: Cluster) -> RoleReport:
    if (placed.rows > 0) != role.generates:
        rule = "generates, so it needs rows, the tensor ranks of a replica" if role.generates else "does not generate"
        raise PlanError(f"rows = {placed.rows}: role {role.name!r} {rule}")
    works = role.trains or role.scores
    if works != (placed.plan is not None):
        rule = f"{role.does}, so it needs a plan" if works else "only generates: leave out its plan"
        raise PlanError(f"role {role.name!r} {rule}")
    if placed.plan is None:
        return RoleReport(name=role.name, pool=pool, seconds={}, rows=placed.rows)
    cost = costs.of(role, cluster, placed.plan)
    return RoleReport(
        name=role.name,
        pool=pool,
        seconds=({PREPARE: cost.score_s} if role.scores else {}) | ({TRAIN: cost.train_s} if role.trains else {}),
        held_bytes=cost.held_bytes,
        working_bytes=cost.working_bytes,
        plan=placed.plan,
        rows=placed.rows,
    )


def _generating(costs: Costs, role: RoleReport, cluster: Cluster, room_bytes: float) -> RoleReport:
    found = costs.generation(cluster, role.rows, room_bytes)
    return replace(
        role,
        seconds={**role.seconds, GENERATE: found.seconds},
        working_bytes=max(role.working_bytes, found.working_bytes),
        generation=found,
    )


def _joined(
    dataflow: Dataflow,
    placement: RolePlacement,
    cluster: Cluster,
    costs: Costs,
    roles: Sequence[RoleReport],
    pools: Sequence[PoolReport],
) -> IterationReport:
    source = next(role for role in roles if role.name == dataflow.source.name)
    generator = next(role for role in roles if role.rows)
    assert source.plan is not None, "a role that generates with its own parameters trains them"
    if pools[generator.pool].is_served:
        here = pool_cluster(cluster, placement.pools[source.pool].devices)
        hand_over = costs.written(here, source.plan)
    elif source.pool == generator.pool:
        here = pool_cluster(cluster, placement.pools[source.pool].devices)
        hand_over = costs.hand_over(here, source.plan, generator.rows)
    else:
        spans = [(pools[index].first, pools[index].devices) for index in (source.pool, generator.pool)]
        hand_over = between_pools(cluster, spans[0], spans[1], generator.rows, dataflow)
    stages = {RESHARD: hand_over.seconds}
    for stage in (GENERATE, PREPARE, TRAIN):
        sums = (sum(r.seconds.get(stage, 0.0) for r in roles if r.pool == index) for index in range(len(pools)))
        stages[stage] = max(sums)
    return IterationReport(
        stages=stages, roles=tuple(roles), pools=tuple(pools), dataflow=dataflow, sent_bytes=hand_over.sent_bytes
    )
