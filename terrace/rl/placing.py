"""The pools of a run: which ranks have which roles, and where each pool is in the cluster.

    [[pool]]
    ranks = 6
    roles = ["actor", "reference"]

    [[pool]]
    ranks = 2
    roles = ["rollout"]

A role that no pool names shares the actor's pool. Without pools all roles are on all ranks.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.words import counted
from terrace.cluster.cluster import Cluster
from terrace.rl.placement.pools import pool_cluster, side_by_side

ACTOR, ROLLOUT, REFERENCE, CRITIC, COST_CRITIC, COST = "actor", "rollout", "reference", "critic", "cost_critic", "cost"
LEARNING = (ACTOR, CRITIC, COST_CRITIC)  # roles with checkpoints, each in a folder of its name


@dataclass(frozen=True, kw_only=True)
class PoolKeys:
    """Consecutive ranks, and the roles that share them."""

    ranks: int  # of the pool; pools lie side by side, the largest first
    roles: tuple[str, ...]  # that share these ranks

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ConfigError(f"pool.ranks = {self.ranks} must be at least 1")
        if not self.roles:
            raise ConfigError(f"a pool of {counted(self.ranks, 'rank')} without roles: name them, or leave it out")


@dataclass(frozen=True)
class Place:
    """A role's pool: its index, its first rank in the whole cluster, and the pool as a cluster of its own."""

    pool: int
    first: int
    cluster: Cluster


def reward_name(index: int) -> str:
    return f"reward_{index}"


def places_of(cluster: Cluster, pools: Sequence[PoolKeys], roles: Collection[str]) -> dict[str, Place]:
    """The pool of each of the run's `roles`.

    Raises `ConfigError` for a role that is unknown or in two pools, a rollout in its actor's pool, and pools that do
    not add up to the cluster. Raises `PlanError` for pools that cannot be placed side by side on the cluster.
    """
    if not pools:
        return dict.fromkeys(roles, Place(0, 0, cluster))
    _check(cluster, pools, roles)
    firsts = side_by_side(cluster, tuple(pool.ranks for pool in pools))
    found: dict[str, Place] = {}
    for index, (pool, first) in enumerate(zip(pools, firsts, strict=True)):
        found |= dict.fromkeys(pool.roles, Place(index, first, pool_cluster(cluster, pool.ranks)))
    return {role: found.get(role, found[ACTOR]) for role in roles}


def _check(cluster: Cluster, pools: Sequence[PoolKeys], roles: Collection[str]) -> None:
    named: dict[str, int] = {}
    for index, pool in enumerate(pools):
        for role in pool.roles:
            if role not in roles:
                raise ConfigError(f"pool[{index}].roles: the run has no role {role!r}{did_you_mean(role, roles)}")
            if role in named:
                raise ConfigError(f"pool[{index}].roles: {role!r} is named twice: a role is on one pool")
            named[role] = index
    if ACTOR not in named:
        raise ConfigError(f"no pool has the role {ACTOR!r}, and roles that no pool names are with it: name it in one")
    if named.get(ROLLOUT) == named[ACTOR]:
        raise ConfigError(
            f"pool[{named[ACTOR]}] has actor and rollout: an actor generates on its own ranks, so leave out the "
            "rollout, or give it another pool"
        )
    total = sum(pool.ranks for pool in pools)
    if total != cluster.world_size:
        raise ConfigError(
            f"pools of {' + '.join(str(pool.ranks) for pool in pools)} ranks on a cluster of {cluster.world_size}: "
            "they must add up to all of its ranks; change them, or the cluster's sizes"
        )


def check_plans(plans: Mapping[str, object], roles: Collection[str], with_plans: Collection[str]) -> None:
    """Raise `ConfigError` for a plan of an unknown role, or of a role that has no plan."""
    for role in plans:
        if role not in roles:
            raise ConfigError(f"plans.{role}: the run has no role {role!r}{did_you_mean(role, with_plans)}")
        if role not in with_plans:
            why = "draws by the plan of its actor" if role == ROLLOUT else "is a function"
            raise ConfigError(f"plans.{role} has no effect: {role!r} {why}; leave it out")
