"""Resolves and checks the configuration of a `terrace rl` run before anything starts.

Model, cluster and plan are given as for `terrace train`: by name or file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError, TerraceError, did_you_mean
from terrace.base.schema import load, read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import parse_model
from terrace.model.facts import next_token_alone
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.rl.algorithms.algorithm import algorithm_of
from terrace.rl.config import RlConfig, roles_of
from terrace.rl.config_layers import given_table, resolve_table
from terrace.rl.effects import check_effects
from terrace.rl.keys import EnvironmentKeys, RewardKeys, RunKeys
from terrace.rl.placing import ACTOR, PoolKeys, check_plans, places_of
from terrace.rl.rates import check_loaded_rates, with_rates
from terrace.rl.rules import check_sections, check_sizes
from terrace.rl.workers.servers import RolloutKeys
from terrace.runtime.settings import OptimizerConfig
from terrace.train.layers import section

# Plan keys that a search for plans keeps, and those for which it has its own error message (terrace.rl.predicted).
_KEPT_BY_SEARCH = ("compute", "master", "messages")
_REFUSED_BY_SEARCH = ("wire", "optimizer_states", "products")
SERVED_BOUND = 2.0  # of importance weights under rollout.engine = "http"; inf turns them off


def resolve(
    task: str | None,
    path: str | None,
    flags: Mapping[str, str | None],
    overrides: Mapping[str, Any],
    *,
    is_placed: bool = True,
    is_resumed: bool = False,
    has_timeouts: bool = False,
) -> RlConfig:
    """Resolve the configuration; raises a `TerraceError` for the first mistake.

    Without `is_placed`, plans may be missing or not fit the sizes, since a search will replace them. With `is_resumed`,
    values of the run's file are kept even if a newer rule would reject them. `has_timeouts` as for `check_effects`.
    """
    table, given = resolve_table(task, path, flags, overrides), given_table(path, flags, overrides)
    if not is_placed:
        table = _to_be_placed(table, given, flags["plan"] if flags.get("plan") is not None else _named_plan(path))
    if ACTOR in given.get("plans", {}) and flags.get("plan") is not None:
        raise ConfigError(
            f"--plan {flags['plan']} has no effect on the actor, which has a plan of its own in [plans]: give "
            "--plans.actor in its place, or leave plans.actor out"
        )
    config = parse(with_rates(table, given), is_placed=is_placed, is_resumed=is_resumed)
    if is_placed:
        check_effects(config, {}, overrides, has_timeouts=has_timeouts)
    # A resumed run keeps its rates, unless the command line changes them.
    if not is_resumed or "optimizer" in overrides:
        check_loaded_rates(config)
    return config


def _named_plan(path: str | None) -> str | None:
    named = None if path is None else read_table(Path(path)).get("plan")
    return named if isinstance(named, str) else None


def _to_be_placed(table: Mapping[str, Any], given: Mapping[str, Any], named_plan: str | None) -> dict[str, Any]:
    """The table of a run for which plans will be searched, reduced to the plan keys that the search keeps or rejects.

    Raises `ConfigError` for a key that the search determines and the user has given.
    """
    if "rows" in given.get("run", {}):
        raise ConfigError(
            f"run.rows = {given['run']['rows']} has no effect with --place auto, which finds the tensor ranks that "
            "a replica generates on: leave run.rows out, or leave out --place"
        )
    if given.get("rollout", {}).get("engine", "own") != "own":
        raise ConfigError(
            "--place auto places generation on the cluster's ranks, and rollout.engine = 'http' has servers for it: "
            "leave one of them out"
        )
    if named_plan is not None:
        raise ConfigError(f"--plan {named_plan} has no effect with --place auto, which finds plans: leave one out")
    for key in given.get("plan", {}):
        if key not in (*_KEPT_BY_SEARCH, *_REFUSED_BY_SEARCH):
            raise ConfigError(
                f"plan.{key} has no effect with --place auto, which finds plans and keeps "
                f"{', '.join(_KEPT_BY_SEARCH)}: leave one of them out"
            )
    own = table.get("plan", {})
    keeps = (*_KEPT_BY_SEARCH, *_REFUSED_BY_SEARCH)
    kept = {key: own[key] for key in keeps if key in own} if isinstance(own, Mapping) else {}
    return {**table, "plan": {"preset": "zero3", **kept}}


def parse(table: Mapping[str, Any], *, is_placed: bool = True, is_resumed: bool = False) -> RlConfig:
    """Build and check a run from its merged table; other arguments as for `resolve`."""
    known = [item.name for item in fields(RlConfig)]
    for name in table:
        if name not in known:
            of_train = "; that is a section of terrace train" if name in ("data", "train") else ""
            raise ConfigError(f"unknown section {name!r}{of_train or did_you_mean(name, known)}")
    if "run" not in table:
        raise ConfigError("section [run] is missing: give --task sort, or --config FILE with one")
    run = load(RunKeys, table["run"], "run")
    for name in ("cluster", "plan", "model"):
        if name not in table:
            raise ConfigError(f"section [{name}] is missing: give --{name}")
        if not isinstance(table[name], Mapping):
            raise ConfigError(f"{name} = {table[name]!r} must be a table, or the name of one or of its file")
    if not isinstance(table.get("weights", ""), str):
        raise ConfigError(f"weights = {table['weights']!r} must be the name of a folder")
    cluster = parse_cluster(dict(table["cluster"]))
    optimizer = load(OptimizerConfig, table.get("optimizer", {}), "optimizer")
    environment = load(EnvironmentKeys, table.get("environment", {}), "environment")
    rewards = table.get("reward", [])
    if not isinstance(rewards, list):
        raise ConfigError(f"reward = {rewards!r} must be a list of tables: write [[reward]] for each")
    reward = tuple(load(RewardKeys, each, f"reward[{index}]") for index, each in enumerate(rewards))
    cost = load(RewardKeys, table["cost"], "cost") if "cost" in table else None
    algorithm, pools = algorithm_of(table.get("algorithm", {})), _pools(table)
    rollout = load(RolloutKeys, table.get("rollout", {}), "rollout")
    if rollout.is_served and algorithm.importance_bound is None:
        # Another engine rounds otherwise, so that its draws are not those of the policy that learns.
        algorithm = replace(algorithm, importance_bound=SERVED_BOUND)
    roles = roles_of(run, algorithm, reward, cost, pools, rollout)
    plans = _plans(table, cluster, pools, roles, optimizer)
    config = RlConfig(
        # Draws tokens one by one, so layers that predict further ones have no part in it.
        model=next_token_alone(parse_model(table["model"])),
        cluster=cluster,
        plan=plans[ACTOR],
        run=run,
        reward=reward,
        environment=environment,
        cost=cost,
        algorithm=algorithm,
        optimizer=optimizer,
        rollout=rollout,
        weights=table.get("weights", ""),
        pool=pools,
        plans={role: plan for role, plan in plans.items() if plan != plans[ACTOR]},
    )
    check_sections(config)
    if is_placed:
        check_sizes(config)
        if not is_resumed:
            check_effects(config, table, {})
    return config


def _pools(table: Mapping[str, Any]) -> tuple[PoolKeys, ...]:
    found = table.get("pool", [])
    if not isinstance(found, list):
        raise ConfigError("pool must be a list of tables: write [[pool]] for each, with ranks and roles")
    return tuple(load(PoolKeys, each, f"pool[{index}]") for index, each in enumerate(found))


def _plans(
    table: Mapping[str, Any],
    cluster: Cluster,
    pools: Sequence[PoolKeys],
    roles: Mapping[str, bool],
    optimizer: OptimizerConfig,
) -> dict[str, Plan]:
    own = table.get("plans", {})
    if not isinstance(own, Mapping):
        raise ConfigError("plans must be a table: write [plans.critic], or plans.critic = the name of a plan")
    with_plans = [role for role, has_engine in roles.items() if has_engine]
    check_plans(own, roles, with_plans)
    places = places_of(cluster, pools, roles)
    found = {}
    for role in with_plans:
        given = section("plan", own.get(role, table["plan"]))
        if not isinstance(given, Mapping):
            raise ConfigError(f"plans.{role} = {given!r} must be a table, or the name of a plan or of its file")
        try:
            plan = command_plan(given, places[role].cluster)
        except TerraceError as error:
            if role not in own:
                raise
            raise type(error)(f"plans.{role}: {error}") from error
        found[role] = replace(plan, update=optimizer.update)
    return found
