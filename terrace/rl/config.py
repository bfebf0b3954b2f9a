"""The file of a run of `terrace rl`, checked whole before anything starts.

Model, cluster and plan are given as to `terrace train`: a name or a file. All sizes are global.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError, PlanError, TerraceError, did_you_mean
from terrace.base.schema import dump, load, read_table
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.plan.validate import check_micro_batch, num_micro_batches
from terrace.rl.agreement import causes
from terrace.rl.algorithms.algorithm import Algorithm, algorithm_of
from terrace.rl.config_layers import given_table, resolve_table
from terrace.rl.effects import check_effects
from terrace.rl.keys import RewardKeys, RunKeys
from terrace.rl.placing import (
    ACTOR,
    COST,
    COST_CRITIC,
    CRITIC,
    LEARNING,
    REFERENCE,
    ROLLOUT,
    Place,
    PoolKeys,
    check_plans,
    places_of,
    reward_name,
)
from terrace.rl.rates import check_loaded_rates, with_rates
from terrace.rl.rules import check_sections, check_sizes
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import section

if TYPE_CHECKING:
    from terrace.planner.roles.placement import RolePlacement

# Keys of a plan: that a search for plans keeps, and that it refuses with words of its own (terrace.rl.predicted).
_KEPT_BY_SEARCH = ("compute", "master", "messages")
_REFUSED_BY_SEARCH = ("wire", "optimizer_states", "products")


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    """A run, resolved."""

    model: ModelConfig
    cluster: Cluster
    plan: Plan
    run: RunKeys
    reward: tuple[RewardKeys, ...]
    cost: RewardKeys | None = None
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    weights: str = ""  # Hugging Face folder; empty: from the seed
    pool: tuple[PoolKeys, ...] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)  # of roles that have another than `plan`

    @property
    def roles(self) -> dict[str, bool]:
        """The roles of a run by name, and whether each has an engine, which has a plan."""
        return roles_of(self.run, self.algorithm, self.reward, self.cost, self.pool)

    @cached_property
    def places(self) -> dict[str, Place]:
        """Where each role is."""
        return places_of(self.cluster, self.pool, self.roles)

    def placed(self, placement: "RolePlacement") -> "RlConfig":
        """This run with its roles as in `placement`; functions are with the actor."""
        roles = [role for pool in placement.pools for role in pool.roles]
        plans = {role.name: replace(role.plan, update=self.optimizer.update) for role in roles if role.plan is not None}
        pools = [
            PoolKeys(ranks=pool.devices, roles=tuple(role.name for role in pool.roles)) for pool in placement.pools
        ]
        return replace(
            self,
            plan=plans[ACTOR],
            plans={role: plan for role, plan in plans.items() if plan != plans[ACTOR]},
            pool=tuple(pools) if len(pools) > 1 else (),
            run=replace(self.run, rows=max(role.rows for role in roles)),
        )

    def plan_of(self, role: str) -> Plan:
        """The plan of a role with an engine."""
        return self.plans.get(role, self.plan)

    @property
    def is_apart(self) -> bool:
        """Whether a rollout draws for the actor."""
        return ROLLOUT in self.roles

    @property
    def rewards(self) -> tuple[RewardKeys, ...]:
        """Rewards and the cost."""
        return (*self.reward, *(() if self.cost is None else (self.cost,)))

    @property
    def sequence(self) -> int:
        """Labels of a row: all tokens of the longest prompt and response but the first."""
        return self.run.max_prompt + self.run.max_response - 1

    @property
    def rollout_is_exact(self) -> bool:
        """Whether generation finds the log-probabilities of training but for rounding in fp32, and no weights of
        rollout against training are asked for. Parameters are handed over as the messages of training round them.
        """
        return self.plan.compute == "fp32" and not causes(self) and self.algorithm.importance_bound is None

    def num_micros(self, batch: int, role: str = ACTOR) -> int:
        """Micro-batches of a role's data rank for a step of `batch` rows.

        Raises `PlanError` where they do not fit a role that trains; one that only scores fills its last micro-batch.
        """
        plan = self.plan_of(role)
        layout = Layout.of(self.places[role].cluster, plan)
        if role in LEARNING:
            try:
                return num_micro_batches(plan, layout, batch)
            except PlanError as error:
                # Its rows are those of an update.
                raise PlanError(f"run.mini_{error}" if str(error).startswith("batch = ") else str(error)) from error
        check_micro_batch(plan)
        return -(-batch // (layout.data_degree * plan.micro_batch))


def roles_of(
    run: RunKeys, algorithm: Algorithm, reward: Sequence[RewardKeys], cost: RewardKeys | None, pools: Sequence[PoolKeys]
) -> dict[str, bool]:
    """`RlConfig.roles` from its parts."""
    found = {ACTOR: True}
    if any(ROLLOUT in pool.roles for pool in pools):
        found[ROLLOUT] = False
    if run.reference:
        found[REFERENCE] = True
    if algorithm.traits.has_critic:
        found[CRITIC] = True
    if algorithm.traits.has_cost:
        found[COST_CRITIC] = True
    found |= {reward_name(index): bool(each.model) for index, each in enumerate(reward)}
    return found | ({} if cost is None else {COST: bool(cost.model)})


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
    """The checked configuration; raises the `TerraceError` of the first mistake.

    Of a run that is not placed yet, plans need not fit its sizes, and there may be none: a search finds others. A
    resumed run keeps the numbers of its file, whatever is refused by now. `has_timeouts` as for `check_effects`.
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
    # A resumed run has its rates, unless it is given others.
    if not is_resumed or "optimizer" in overrides:
        check_loaded_rates(config)
    return config


def _named_plan(path: str | None) -> str | None:
    named = None if path is None else read_table(Path(path)).get("plan")
    return named if isinstance(named, str) else None


def _to_be_placed(table: Mapping[str, Any], given: Mapping[str, Any], named_plan: str | None) -> dict[str, Any]:
    """The table of a run for which a search finds plans; of its own plan the dtypes stay.

    Raises `ConfigError` for what the search finds and the user has given.
    """
    if "rows" in given.get("run", {}):
        raise ConfigError(
            f"run.rows = {given['run']['rows']} has no effect with --place auto, which finds the tensor ranks that "
            "a replica generates on: leave run.rows out, or leave out --place"
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
    """Builds and checks a run from its whole table; other arguments as for `resolve`."""
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
    rewards = table.get("reward", [])
    if not isinstance(rewards, list) or not rewards:
        raise ConfigError('reward is missing: write [[reward]] for each, with function = "module:function"')
    reward = tuple(load(RewardKeys, each, f"reward[{index}]") for index, each in enumerate(rewards))
    cost = load(RewardKeys, table["cost"], "cost") if "cost" in table else None
    algorithm, pools = algorithm_of(table.get("algorithm", {})), _pools(table)
    roles = roles_of(run, algorithm, reward, cost, pools)
    plans = _plans(table, cluster, pools, roles, optimizer)
    config = RlConfig(
        model=parse_model(table["model"]),
        cluster=cluster,
        plan=plans[ACTOR],
        run=run,
        reward=reward,
        cost=cost,
        algorithm=algorithm,
        optimizer=optimizer,
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
    """The plan of every role with an engine: its own or the run's, on the ranks of its pool."""
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


def to_toml_table(config: RlConfig) -> dict[str, Any]:
    """The resolved configuration; `parse` reads it back to an equal value."""
    table = {item.name: dump(getattr(config, item.name)) for item in fields(config)}
    table["model"] = dump(to_table(config.model))
    return {name: value for name, value in table.items() if value is not None and value not in ("", [], {})}
