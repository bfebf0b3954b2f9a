"""The file of a run of `terrace rl`, checked whole before anything starts.

Model, cluster and plan are given as to `terrace train`: a name or a file. All sizes are global.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.schema import dump, load
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import parse_cluster
from terrace.model.config import ModelConfig, parse_model, to_table
from terrace.plan.layout import Layout
from terrace.plan.mesh import TENSOR, Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import command_plan
from terrace.plan.validate import num_micro_batches
from terrace.rl.algorithms.algorithm import NEEDS_CRITIC, Algorithm, algorithm_of
from terrace.rl.config_layers import given_table, resolve_table
from terrace.rl.keys import RewardKeys, RunKeys
from terrace.rl.placing import (
    ACTOR,
    COST,
    COST_CRITIC,
    CRITIC,
    REFERENCE,
    ROLLOUT,
    Place,
    PoolKeys,
    check_plans,
    places_of,
    reward_name,
)
from terrace.rl.sort_task import LONGEST_PROMPT, LONGEST_RESPONSE, VOCAB
from terrace.runtime.settings import OptimizerConfig
from terrace.train.config import section

if TYPE_CHECKING:
    from terrace.planner.roles.placement import RolePlacement


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
        """Whether generation finds the log-probabilities of training but for rounding in fp32: nothing is coded on its
        way or in a product, and no weights of rollout against training are asked for.
        """
        formats = {self.plan.compute, self.plan.messages or "fp32"}
        rounds = self.plan.wire or self.plan.products
        return formats == {"fp32"} and not rounds and self.algorithm.importance_bound is None

    def num_micros(self, batch: int, role: str = ACTOR) -> int:
        """Micro-batches of a role's data rank for a step of `batch` rows.

        Raises `PlanError` where they do not fit a role that trains; one that only scores fills its last micro-batch.
        """
        plan = self.plan_of(role)
        layout = Layout.of(self.places[role].cluster, plan)
        if role in (ACTOR, CRITIC, COST_CRITIC):
            return num_micro_batches(plan, layout, batch)
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
    if algorithm.name in NEEDS_CRITIC:
        found[CRITIC] = True
    if algorithm.name == "safe-rlhf":
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
) -> RlConfig:
    """The checked configuration; raises the `TerraceError` of the first mistake.

    Of a run that is not placed yet, plans need not fit its sizes, and there may be none: a search finds others.
    """
    table, given = resolve_table(task, path, flags, overrides), given_table(path, flags, overrides)
    if not is_placed:
        table.setdefault("plan", {"preset": "zero3"})
        if "rows" in given.get("run", {}):
            raise ConfigError(
                f"run.rows = {given['run']['rows']} has no effect with --place auto, which finds the tensor ranks that "
                "a replica generates on: leave run.rows out, or leave out --place"
            )
    if ACTOR in given.get("plans", {}) and flags.get("plan") is not None:
        raise ConfigError(
            f"--plan {flags['plan']} has no effect on the actor, which has a plan of its own in [plans]: give "
            "--plans.actor in its place, or leave plans.actor out"
        )
    return parse(table, is_placed=is_placed)


def parse(table: Mapping[str, Any], *, is_placed: bool = True) -> RlConfig:
    """Builds and checks a run from its whole table; `is_placed` as for `resolve`."""
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
    plans = _plans(table, cluster, pools, roles_of(run, algorithm, reward, cost, pools), optimizer)
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
    _check(config)
    if is_placed:
        _check_sizes(config)
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
        found[role] = replace(command_plan(given, places[role].cluster), update=optimizer.update)
    return found


def to_toml_table(config: RlConfig) -> dict[str, Any]:
    """The resolved configuration; `parse` reads it back to an equal value."""
    table = {item.name: dump(getattr(config, item.name)) for item in fields(config)}
    table["model"] = dump(to_table(config.model))
    return {name: value for name, value in table.items() if value is not None and value not in ("", [], {})}


def _check(config: RlConfig) -> None:
    if "fp16" in (config.plan.compute, *(plan.compute for plan in config.plans.values())):
        raise ConfigError("plan.compute = 'fp16': losses of token numbers are not scaled; use 'bf16' or 'fp32'")
    algorithm, run = config.algorithm, config.run
    if algorithm.kl_coefficient and not run.reference:
        raise ConfigError(
            f"algorithm.kl_coefficient = {algorithm.kl_coefficient} needs the reference: leave out run.reference"
        )
    if (config.cost is not None) != (algorithm.name == "safe-rlhf"):
        raise ConfigError(
            f"[cost] and algorithm.name = {algorithm.name!r}: safe-rlhf needs a [cost], and no other algorithm has one"
        )
    if config.cost is not None and config.cost.weight != 1:
        raise ConfigError(
            f"cost.weight = {config.cost.weight} has no effect: the multiplier weighs the cost; leave it out, or set "
            "algorithm.multiplier"
        )
    drawn = run.prompts * run.responses
    if algorithm.kl_target is not None and drawn >= 5 * algorithm.kl_horizon:
        raise ConfigError(
            f"algorithm.kl_horizon = {algorithm.kl_horizon:g}: a step of {drawn} responses could turn the sign of the "
            f"coefficient; it must be above {drawn / 5:g}"
        )
    if algorithm.entropy and any(Mesh.of(config.places[ACTOR].cluster, config.plan).total(axis) > 1 for axis in TENSOR):
        raise ConfigError(
            f"algorithm.entropy = {algorithm.entropy} has no form where a tensor axis cuts the vocabulary: leave it "
            "out, or give the ranks of that axis to another"
        )
    _check_task(run)
    if run.start_steps and not run.task:
        raise ConfigError(f"run.start_steps = {run.start_steps}: only a task has right responses; leave it out")
    if algorithm.name not in NEEDS_CRITIC and run.critic_lr != RunKeys.critic_lr:
        raise ConfigError(
            f"run.critic_lr = {run.critic_lr} has no effect: algorithm.name = {algorithm.name!r} has no critic"
        )
    if config.is_apart and run.max_lag and len(config.pool[config.places[ROLLOUT].pool].roles) > 1:
        raise ConfigError(
            f"run.max_lag = {run.max_lag} lets the rollout draw while others learn, and the other roles of its pool "
            "would wait for it: give it a pool of its own, or set run.max_lag = 0"
        )


def _check_sizes(config: RlConfig) -> None:
    for role, has_engine in config.roles.items():
        if has_engine:
            config.num_micros(config.run.mini_batch, role)


def check_vocabulary(run: RunKeys, model: ModelConfig) -> None:
    """Raise `ConfigError` for a model with more tokens than its task has; a prediction does not need this check."""
    if run.task and model.vocab_size > VOCAB:
        raise ConfigError(
            f"task {run.task!r} has a tokenizer of its own, of {VOCAB} tokens, and the model would write "
            f"{model.vocab_size}: leave --model out, or give run.prompts_file in place of the task"
        )


def _check_task(run: RunKeys) -> None:
    if run.task and run.max_prompt < LONGEST_PROMPT:
        raise ConfigError(
            f"run.max_prompt = {run.max_prompt}: prompts of task {run.task!r} have up to {LONGEST_PROMPT} tokens; "
            "raise it"
        )
    if run.task and run.start_steps and run.max_response < LONGEST_RESPONSE:
        raise ConfigError(
            f"run.max_response = {run.max_response}: the responses that a supervised start learns have up to "
            f"{LONGEST_RESPONSE} tokens; raise it, or set run.start_steps = 0"
        )
