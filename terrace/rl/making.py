"""Creates the roles of a run on their pools, from settings that are checked before any process starts."""

import os
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from terrace.base.errors import ModelError, PlanError
from terrace.base.words import counted
from terrace.checkpoint.layout import folder_of
from terrace.generation.cache_shape import cache_shape
from terrace.model.blocks import block_specs
from terrace.model.config import load_model
from terrace.model.facts import (
    has_scalar_head,
    is_dense,
    longest_text,
    refuse_non_causal,
    vocabulary_size,
    with_scalar_head,
)
from terrace.model.spec import freeze
from terrace.plan.context import is_context_parallel
from terrace.plan.keep import DEVICE
from terrace.plan.keep_rules import check_clip
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.program.lowering import build_stages
from terrace.rl.calls.layout import RoleLayout
from terrace.rl.calls.runtime import Group, Pool, Runtime
from terrace.rl.config import RlConfig
from terrace.rl.controllers.setup import Roles
from terrace.rl.hand_over.transition import Apart
from terrace.rl.placing import ACTOR, COST, COST_CRITIC, CRITIC, LEARNING, REFERENCE, ROLLOUT, reward_name
from terrace.rl.rules import naming
from terrace.rl.run import HANDED, START, Run, RunInputs
from terrace.rl.workers.critic import Critic
from terrace.rl.workers.engine_rows import ALL
from terrace.rl.workers.environments import EnvironmentSettings
from terrace.rl.workers.policy import Actor, Reference, Student
from terrace.rl.workers.reward_function import RewardFunction
from terrace.rl.workers.reward_model import RewardModel
from terrace.rl.workers.rollout import Rollout
from terrace.rl.workers.served import ServedRollout
from terrace.rl.workers.settings import EngineSettings
from terrace.runtime.settings import OptimizerConfig

_Worker = tuple[type, Mapping[str, Any]]  # a class and its settings


def check_roles(config: RlConfig) -> None:
    """Raise `PlanError` or `ModelError` for a plan or model that a role cannot run with; starts no process."""
    _check_model(config)
    workers = workers_of(config, config.weights)
    for role, (_, settings) in workers.items():
        if config.roles[role]:
            with naming(config, role):
                _check_engine(settings["settings"], learns=role in LEARNING)
    if config.run.start_steps:
        with naming(config, "actor, at its supervised start"):
            _check_engine(student_settings(config), learns=True)
    for role, (worker, settings) in workers.items():
        layout = getattr(worker, "layout", None)
        if layout is not None:
            with naming(config, role):
                found: RoleLayout = layout(config.places[role].cluster.world_size, **settings)
            assert found.num_ranks == config.places[role].cluster.world_size, "a role has the ranks of its pool"


def _check_model(config: RlConfig) -> None:
    longest = config.run.max_prompt + config.run.max_response
    for model, named in ((config.model, "the model"), (config.reference_model, "run.reference")):
        if 0 < (most := longest_text(model)) < longest:
            raise ModelError(
                f"run.max_prompt + run.max_response = {longest} tokens, and {named} has "
                f"{most} positions: lower one of them"
            )
        refuse_non_causal(model)
    if has_scalar_head(config.model):
        raise ModelError("the model is a reward model, which writes nothing: name a causal language model")
    if config.run.router_replay and is_dense(config.model):
        raise ModelError("run.router_replay repeats the choice of experts, and the model has none: leave it out")
    cache_shape(block_specs(config.model), config.run.rows)


def _check_engine(settings: EngineSettings, *, learns: bool) -> None:
    """Build a role's programs as its engine would, to raise the same errors for its plan."""
    cluster, plan = settings.cluster, settings.plan
    if is_context_parallel(Mesh.of(cluster, plan), plan):
        raise PlanError("responses need whole rows: leave out the context axis and balance")
    if plan.outer.has_islands:
        raise PlanError("islands would generate with parameters that differ: leave out plan.outer")
    for key, medium in (("params", plan.keep.params), ("table", plan.keep.table)):
        if medium != DEVICE:
            raise PlanError(
                f"keep.{key} = {medium!r}: a role hands over the parameters that its device holds; leave it out"
            )
    if learns:
        check_clip(plan, settings.optimizer.clip)
    blocks = block_specs(settings.model)
    build_stages(cluster, plan, blocks if learns else freeze(blocks, ALL), settings.num_micros, settings.sequence)


def engine_settings(
    config: RlConfig, role: str, weights: str, batch: int, optimizer: OptimizerConfig | None = None
) -> EngineSettings:
    """Engine settings of a role with `batch` rows per step; raises `PlanError` if the plan cannot divide them."""
    plan = config.plan_of(role)
    return EngineSettings(
        model=config.model,
        cluster=config.places[role].cluster,
        # A role that only scores has no optimizer, so its plan must not depend on one, nor be refused for its settings.
        plan=plan if role in LEARNING else replace(plan, update=OptimizerConfig().update),
        num_micros=config.num_micros(batch, role),
        sequence=config.sequence,
        optimizer=(optimizer or config.optimizer) if role in LEARNING else OptimizerConfig(clip=config.optimizer.clip),
        weights=weights,
        seed=config.run.seed,
    )


def reward_settings(config: RlConfig, role: str, folder: str) -> EngineSettings:
    """Engine settings of a reward model; raises `ModelError` if the folder's model has no scalar head."""
    model = load_model(folder)
    if not has_scalar_head(model):
        raise ModelError(
            f"{folder} is no reward model: its head has {vocabulary_size(model)} outputs, and a reward is one; "
            'train one with train.objective = "reward"'
        )
    settings = engine_settings(config, role, folder, config.run.mini_batch)
    # One label more, since the reward is read at the last token.
    return replace(settings, model=model, sequence=config.sequence + 1)


def apart_of(config: RlConfig) -> Apart | None:
    """The two pools of a hand-over to a rollout; None if the actor generates itself, or servers do."""
    if not config.is_apart or config.rollout.is_served:
        return None
    actor, rollout = config.places[ACTOR], config.places[ROLLOUT]
    return Apart(cluster=config.cluster, source=actor.first, first=rollout.first, target=rollout.cluster)


def workers_of(
    config: RlConfig, weights: str, inputs: RunInputs | None = None, folder: Path = Path()
) -> dict[str, _Worker]:
    """Class and settings of every role of a run in `folder`.

    Without `inputs`, the settings are sufficient only for checks and layouts.
    """
    run, apart = config.run, apart_of(config)
    policy = engine_settings(config, ACTOR, weights, run.mini_batch)
    drawing = {
        "settings": policy,
        "num_tokens": run.max_response,
        "stops": frozenset() if inputs is None else inputs.stops,
        "seed": run.seed,
        "environment": environment_of(config, inputs),
    }
    draws = {**drawing, "rows": run.rows, "apart": apart, "timeout_s": run.timeout_s, "keeps_routes": run.router_replay}
    # A start of a run that goes on may draw other responses, and so have other weights of the same version.
    handed = str(folder / HANDED / secrets.token_hex(4)) if config.rollout.is_served else ""
    found: dict[str, _Worker] = {ACTOR: (Actor, {**draws, "algorithm": config.algorithm, "handed": handed})}
    if config.rollout.is_served:
        found[ROLLOUT] = (ServedRollout, {**drawing, "keys": config.rollout, "handed": handed})
    elif apart is not None:
        found[ROLLOUT] = (Rollout, draws)
    if REFERENCE in config.roles:
        settings = engine_settings(config, REFERENCE, config.reference_folder or weights, run.mini_batch)
        found[REFERENCE] = (Reference, {"settings": replace(settings, model=config.reference_model)})
    optimizer = replace(config.optimizer, lr=run.critic_lr)
    for role in (each for each in (CRITIC, COST_CRITIC) if each in config.roles):
        settings = engine_settings(config, role, weights, run.mini_batch, optimizer)
        settings = replace(settings, model=with_scalar_head(config.model))
        found[role] = (Critic, {"settings": settings, "value_clip": config.algorithm.value_clip})
    given = {reward_name(index): reward for index, reward in enumerate(config.reward)}
    for role, reward in (given | ({COST: config.cost} if config.cost is not None else {})).items():
        column = {"column": "cost" if role == COST else "reward"}
        if reward.model:
            found[role] = (RewardModel, {**column, "settings": reward_settings(config, role, reward.model)})
        else:
            tokenizer = None if inputs is None else inputs.tokenizer
            # The user's module is in the command's working folder, which ranks on other machines do not have as theirs.
            judge = {"function": reward.function, "tokenizer": tokenizer, "folder": os.getcwd()}
            found[role] = (RewardFunction, {**column, **judge, "deadline_s": run.reward_timeout_s})
    return found


def environment_of(config: RlConfig, inputs: RunInputs | None) -> EnvironmentSettings:
    """The environment of a run, for the role that generates."""
    own = config.environment
    return EnvironmentSettings(
        name=own.name,
        folder=os.getcwd(),
        tokenizer=None if inputs is None else inputs.tokenizer,
        chat="" if inputs is None else inputs.chat,
        max_turns=own.max_turns,
        deadline_s=own.deadline_s,
        overlap=own.overlap,
    )


def started(inputs: RunInputs, runtime: Runtime, folder: Path, say: Callable[[str], None]) -> Run:
    """Start a run's pools, do its supervised start if it has one, and create its roles."""
    config = inputs.config
    pools = [runtime.pool(size) for size in [pool.ranks for pool in config.pool] or [config.cluster.world_size]]
    actors = pools[config.places[ACTOR].pool]
    weights = str(_begun(inputs, actors, folder / START, say)) if config.run.start_steps else config.weights
    roles, rollout = made_roles(inputs, runtime, pools, weights, folder)
    return Run(inputs, runtime, roles, rollout, folder)


def _begun(inputs: RunInputs, pool: Pool, folder: Path, say: Callable[[str], None]) -> Path:
    """Do the supervised start unless `folder` has its checkpoint. Returns the checkpoint's folder."""
    run, examples = inputs.config.run, inputs.examples
    assert examples is not None, "only a task with examples has a supervised start"
    saved = folder_of(folder, run.start_steps)
    if (saved / "manifest.json").is_file():
        return saved
    student = pool.host(student=(Student, {"settings": student_settings(inputs.config)}))["student"]
    for step in range(run.start_steps):
        loss = student.update(examples(step * run.start_batch, run.start_batch), lr=run.start_lr)["loss"]
    say(f"supervised start: {counted(run.start_steps, 'step')} of {run.start_batch} examples, loss {loss:.3f}")
    return Path(student.finish(folder=folder, step=run.start_steps))


def made_roles(
    inputs: RunInputs, runtime: Runtime, pools: list[Pool], weights: str, folder: Path
) -> tuple[Roles, Group | None]:
    """Create a run's roles on its pools. Returns them, and the rollout if there is one, connected to the actor."""
    config = inputs.config
    workers, made = workers_of(config, weights, inputs, folder), dict[str, Group]()
    for index, pool in enumerate(pools):
        made |= pool.host(**{role: each for role, each in workers.items() if config.places[role].pool == index})
    if apart_of(config) is not None:
        address, port = runtime.meeting()
        joining = [made[role].join.remote(address=address, port=port) for role in (ACTOR, ROLLOUT)]
        for each in joining:
            each.get()
    roles = Roles(
        actor=made[ACTOR],
        rewards=tuple((reward.weight, made[reward_name(index)]) for index, reward in enumerate(config.reward)),
        reference=made.get(REFERENCE),
        cost=made.get(COST),
        critic=made.get(CRITIC),
        cost_critic=made.get(COST_CRITIC),
    )
    return roles, made.get(ROLLOUT)


def student_settings(config: RlConfig) -> EngineSettings:
    settings = engine_settings(config, ACTOR, config.weights, config.run.mini_batch)
    rows = Layout.of(settings.cluster, settings.plan).data_degree * settings.plan.micro_batch
    # The last micro-batch is filled with rows without labels.
    num_micros = -(-config.run.start_batch // rows)
    return replace(settings, num_micros=num_micros, optimizer=replace(config.optimizer, lr=config.run.start_lr))
