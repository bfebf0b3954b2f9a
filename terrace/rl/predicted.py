"""A run as a dataflow of roles, and its predicted iteration (terrace.planner.roles).

Every prompt and response counts as long as the longest, so that memory is that of the worst step. Rewards by a function
are no model; neither the greedy responses of ReMax nor the further rounds of DAPO are counted.
"""

from collections import defaultdict
from dataclasses import replace

from terrace.base.errors import ConfigError, PlanError
from terrace.model.config import load_model
from terrace.model.facts import with_scalar_head
from terrace.planner.roles.dataflow import GENERATE, PREPARE, RESHARD, TRAIN, Dataflow, Role
from terrace.planner.roles.placement import IterationReport, PlacedRole, Pool, RolePlacement, price
from terrace.planner.roles.search import FoundPlacements, find
from terrace.rl.config import RlConfig
from terrace.rl.placing import ACTOR, COST, COST_CRITIC, CRITIC, REFERENCE, ROLLOUT, reward_name
from terrace.rl.totals import Totals

PHASES = {  # of a stage, in `time/...`
    RESHARD: ("reshard",),
    GENERATE: ("generate",),
    PREPARE: ("old_log_prob", "ref", "values", "reward"),
    TRAIN: ("update",),
}


def dataflow_of(config: RlConfig) -> Dataflow:
    """The models of a run and the sizes of its steps; `ModelError` for responses longer than a model has positions."""
    model, run = config.model, config.run
    # Responses of older weights are scored anew.
    scores = not config.rollout_is_exact or run.max_lag > 0
    roles = [Role(name=ACTOR, model=model, generates=not config.is_apart, scores=scores, trains=True)]
    if config.is_apart:
        roles.append(Role(name=ROLLOUT, model=model, generates=True, follows=ACTOR))
    if run.reference:
        roles.append(Role(name=REFERENCE, model=model, scores=True))
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
    """Where a run has its roles. A pool of functions alone is left out: they are no model."""
    pools = defaultdict[int, list[PlacedRole]](list)
    for role in dataflow_of(config).roles:
        plan = config.plan_of(role.name) if role.trains or role.scores else None
        placed = PlacedRole(name=role.name, plan=plan, rows=config.run.rows if role.generates else 0)
        pools[config.places[role.name].pool].append(placed)
    sizes = [pool.ranks for pool in config.pool] or [config.cluster.world_size]
    return RolePlacement(pools=tuple(Pool(devices=sizes[at], roles=tuple(pools[at])) for at in sorted(pools)))


def found_placements(config: RlConfig) -> FoundPlacements:
    """The fastest placements of a run's roles, also with a rollout apart where a lag lets it draw ahead.

    Their plans have the dtypes of the run's, and no formats. Raises `PlanError` where none has room, and `ConfigError`
    for a run that asks for formats.
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
    """Seconds of a step, by stage and as a whole (`step`), as a run measured them (`time/...`).

    They are the means over its steps but the first, if there are others.
    """
    return {
        stage: sum(measured.steady(f"time/{phase}") for phase in phases)
        for stage, phases in (*PHASES.items(), ("step", ("step",)))
    }


def predicted(config: RlConfig) -> IterationReport:
    """The predicted iteration of a run; raises `PlanError` for a plan that cannot run."""
    return price(dataflow_of(config), placement_of(config), config.cluster)
