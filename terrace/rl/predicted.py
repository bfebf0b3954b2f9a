"""Converts a run to a dataflow of roles and predicts its iteration (terrace.rl.placement).

Every prompt and response is taken to have the maximum length, so that memory is that of the worst step. Not counted are
reward functions, the greedy responses of ReMax, and additional sampling rounds of DAPO.
"""

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from terrace.base.errors import ConfigError, PlanError
from terrace.model.config import load_model
from terrace.model.facts import with_scalar_head
from terrace.rl.agreement import rollout_is_exact
from terrace.rl.config import RlConfig
from terrace.rl.placement.dataflow import GENERATE, PREPARE, RESHARD, TRAIN, Dataflow, Role
from terrace.rl.placement.placement import IterationReport, PlacedRole, Pool, RolePlacement, price
from terrace.rl.placing import ACTOR, COST, COST_CRITIC, CRITIC, REFERENCE, ROLLOUT, PoolKeys, reward_name
from terrace.rl.totals import Totals

if TYPE_CHECKING:
    from terrace.rl.placement.search import FoundPlacements

PHASES = {  # stage of an iteration -> its phases in `time/...`
    RESHARD: ("reshard",),
    GENERATE: ("generate",),
    PREPARE: ("old_log_prob", "ref", "values", "reward"),
    TRAIN: ("update",),
}


def dataflow_of(config: RlConfig) -> Dataflow:
    """A run's models and step sizes; raises `ModelError` for responses that exceed a model's positions."""
    model, run = config.model, config.run
    # Responses from older weights need a scoring pass.
    scores = not rollout_is_exact(config) or run.max_lag > 0
    has_rollout = ROLLOUT in config.roles
    roles = [Role(name=ACTOR, model=model, generates=not has_rollout, scores=scores, trains=True)]
    if has_rollout:
        roles.append(Role(name=ROLLOUT, model=model, generates=True, follows=ACTOR))
    if run.reference:
        roles.append(Role(name=REFERENCE, model=config.reference_model, scores=True))
    of_values = with_scalar_head(model)
    critics = [each for each in (CRITIC, COST_CRITIC) if each in config.roles]
    roles += [Role(name=critic, model=of_values, scores=True, trains=True) for critic in critics]
    named = {reward_name(index): reward for index, reward in enumerate(config.reward)}
    for each, reward in (named | ({} if config.cost is None else {COST: config.cost})).items():
        if reward.model:
            roles.append(Role(name=each, model=load_model(reward.model), scores=True))
    return Dataflow(
        roles=tuple(roles),
        prompts=run.prompts,
        samples=run.responses,
        prompt_tokens=run.max_prompt,
        response_tokens=run.max_response,
        updates=run.prompts * run.responses // run.mini_batch,
        epochs=run.epochs,
        compute=config.plan.compute,
        master=config.plan.master,
        messages=config.plan.messages,
        ahead=config.is_apart and run.max_lag > 0,
    )


def placement_of(config: RlConfig) -> RolePlacement:
    """The pools of a run with their models; pools with only reward functions are left out.

    Servers are taken to have `run.rows` devices each, like those of the cluster.
    """
    pools, servers = defaultdict[int, list[PlacedRole]](list), list[Pool]()
    for role in dataflow_of(config).roles:
        plan = config.plan_of(role.name) if role.trains or role.scores else None
        placed = PlacedRole(name=role.name, plan=plan, rows=config.run.rows if role.generates else 0)
        if role.generates and config.rollout.is_served:
            devices = len(config.rollout.urls) * config.run.rows
            servers.append(Pool(devices=devices, roles=(placed,), is_served=True))
            continue
        pools[config.places[role.name].pool].append(placed)
    sizes = [pool.ranks for pool in config.pool] or [config.cluster.world_size]
    return RolePlacement(pools=(*(Pool(devices=sizes[at], roles=tuple(pools[at])) for at in sorted(pools)), *servers))


def placed_run(config: RlConfig, placement: RolePlacement) -> RlConfig:
    """The run with its roles placed as in `placement`; reward functions share the actor's pool."""
    roles = [role for pool in placement.pools for role in pool.roles]
    plans = {role.name: replace(role.plan, update=config.optimizer.update) for role in roles if role.plan is not None}
    pools = [PoolKeys(ranks=pool.devices, roles=tuple(role.name for role in pool.roles)) for pool in placement.pools]
    return replace(
        config,
        plan=plans[ACTOR],
        plans={role: plan for role, plan in plans.items() if plan != plans[ACTOR]},
        pool=tuple(pools) if len(pools) > 1 else (),
        run=replace(config.run, rows=max(role.rows for role in roles)),
    )


def found_placements(config: RlConfig) -> "FoundPlacements":
    """Search the fastest placements of a run's roles; if `max_lag` allows generating ahead, also with a rollout.

    The found plans keep the run's dtypes and use no wire formats, coded optimizer states or 8-bit products. Raises
    `PlanError` if no placement fits in memory, and `ConfigError` for a run that configures one of these.
    """
    if config.plan.wire:
        formats = ", ".join(
            f"{message}.{tier} = {format_!r}"
            for message, row in config.plan.wire.items()
            for tier, format_ in row.items()
        )
        raise ConfigError(
            f"--place auto finds plans that round no message, and the run has wire {formats}: leave out plan.wire, or "
            "the preset that has it, or leave out --place"
        )
    if config.plan.optimizer_states is not None:
        raise ConfigError(
            f"--place auto finds plans that store moments as they are, and the run has plan.optimizer_states = "
            f"{config.plan.optimizer_states!r}: leave it out, or leave out --place"
        )
    if config.plan.products is not None:
        raise ConfigError(
            f"--place auto finds plans that multiply in their compute dtype, and the run has plan.products = "
            f"{config.plan.products!r}: leave it out, or leave out --place"
        )
    # Imported here: a run whose roles have their places needs no search.
    from terrace.rl.placement.search import FoundPlacements, find

    together = dataflow_of(replace(config, pool=()))
    if not config.run.max_lag:
        return find(together, config.cluster)
    actor, *others = together.roles
    rollout = Role(name=ROLLOUT, model=config.model, generates=True, follows=ACTOR)
    apart = replace(together, roles=(replace(actor, generates=False), rollout, *others), ahead=True)
    found, failed = list[FoundPlacements](), list[PlanError]()
    for flow in (together, apart) if config.cluster.world_size > 1 else (together,):
        try:
            found.append(find(flow, config.cluster))
        except PlanError as error:
            failed.append(error)
    if not found:
        raise failed[0]
    best = sorted((each for one in found for each in one.best), key=lambda placed: placed.seconds)
    return FoundPlacements(best=tuple(best), num_tried=sum(one.num_tried for one in found))


def stages_of(measured: Totals) -> dict[str, float]:
    """Measured seconds (`time/...`) of a step by stage, and in total under "step".

    Means over all steps but the first, unless there is only one.
    """
    return {
        stage: sum(measured.steady(f"time/{phase}") for phase in phases)
        for stage, phases in (*PHASES.items(), ("step", ("step",)))
    }


def predicted(config: RlConfig) -> IterationReport:
    """Predict an iteration of a run; raises `PlanError` for a plan that cannot run."""
    return price(dataflow_of(config), placement_of(config), config.cluster)
