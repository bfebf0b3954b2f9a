"""The configuration of a `terrace rl` run, which `terrace.rl.resolve` parses and checks. All sizes are global."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from terrace.base.errors import PlanError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster
from terrace.model.config import ModelConfig, to_table
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.validate import check_micro_batch, num_micro_batches
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.keys import EnvironmentKeys, RewardKeys, RunKeys
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
    places_of,
    reward_name,
)
from terrace.rl.workers.servers import RolloutKeys
from terrace.runtime.settings import OptimizerConfig
from terrace.train.teacher_keys import model_in


@dataclass(frozen=True, kw_only=True)
class RlConfig:
    model: ModelConfig
    cluster: Cluster
    plan: Plan
    run: RunKeys
    reward: tuple[RewardKeys, ...]
    environment: EnvironmentKeys = field(default_factory=EnvironmentKeys)
    cost: RewardKeys | None = None
    algorithm: Algorithm = field(default_factory=Algorithm)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutKeys = field(default_factory=RolloutKeys)
    weights: str = ""  # Hugging Face folder; empty: from the seed
    pool: tuple[PoolKeys, ...] = ()
    plans: Mapping[str, Plan] = field(default_factory=dict)  # of roles that have another than `plan`

    @property
    def roles(self) -> dict[str, bool]:
        """The run's roles by name, and whether each has an engine (and so a plan)."""
        return roles_of(self.run, self.algorithm, self.reward, self.cost, self.pool, self.rollout)

    @property
    def reference_folder(self) -> str:
        """The folder of a reference that is another model; "": the policy of the start."""
        return self.run.reference if isinstance(self.run.reference, str) else ""

    @property
    def reference_model(self) -> ModelConfig:
        """The model of the reference. Raises as reading its folder does."""
        return model_in(self.reference_folder, "run.reference") if self.reference_folder else self.model

    @cached_property
    def places(self) -> dict[str, Place]:
        return places_of(self.cluster, self.pool, self.roles)

    def plan_of(self, role: str) -> Plan:
        return self.plans.get(role, self.plan)

    @property
    def is_apart(self) -> bool:
        """Whether a rollout role with a pool of its own generates, or asks servers to."""
        return ROLLOUT in self.roles and self.places[ROLLOUT].pool != self.places[ACTOR].pool

    @property
    def rewards(self) -> tuple[RewardKeys, ...]:
        """All rewards, and the cost if there is one."""
        return (*self.reward, *(() if self.cost is None else (self.cost,)))

    @property
    def sequence(self) -> int:
        """Labels per row: the longest prompt plus the longest response, minus the first token."""
        return self.run.max_prompt + self.run.max_response - 1

    def num_micros(self, batch: int, role: str = ACTOR) -> int:
        """Micro-batches per data rank of a role for a step of `batch` rows.

        Raises `PlanError` if a role that trains cannot divide the rows evenly; roles that only score pad the last
        micro-batch.
        """
        plan = self.plan_of(role)
        layout = Layout.of(self.places[role].cluster, plan)
        if role in LEARNING:
            try:
                return num_micro_batches(plan, layout, batch)
            except PlanError as error:
                # The batch of a role that trains is `run.mini_batch`, so the error names that key.
                raise PlanError(f"run.mini_{error}" if str(error).startswith("batch = ") else str(error)) from error
        check_micro_batch(plan)
        return -(-batch // (layout.data_degree * plan.micro_batch))


def roles_of(
    run: RunKeys,
    algorithm: Algorithm,
    reward: Sequence[RewardKeys],
    cost: RewardKeys | None,
    pools: Sequence[PoolKeys],
    rollout: RolloutKeys,
) -> dict[str, bool]:
    """`RlConfig.roles` from its parts."""
    found = {ACTOR: True}
    if rollout.is_served or any(ROLLOUT in pool.roles for pool in pools):
        found[ROLLOUT] = False
    if run.reference:
        found[REFERENCE] = True
    if algorithm.traits.has_critic:
        found[CRITIC] = True
    if algorithm.traits.has_cost:
        found[COST_CRITIC] = True
    found |= {reward_name(index): bool(each.model) for index, each in enumerate(reward)}
    return found | ({} if cost is None else {COST: bool(cost.model)})


def to_toml_table(config: RlConfig) -> dict[str, Any]:
    """The resolved configuration; `parse` reads it back to an equal value."""
    table = {item.name: dump(getattr(config, item.name)) for item in fields(config)}
    table["model"] = dump(to_table(config.model))
    table["rollout"] = table["rollout"] if config.rollout.is_served else {}
    if not config.environment.name:
        del table["environment"]
    return {name: value for name, value in table.items() if value is not None and value not in ("", [], {})}
