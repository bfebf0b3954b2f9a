"""A run as a dataflow of roles, and its predicted iteration (terrace.planner.roles).

Every prompt and response counts as long as the longest, so that memory is that of the worst step. Rewards by a function
are no model; neither the greedy responses of ReMax nor the further rounds of DAPO are counted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from terrace.model.config import load_model
from terrace.plan.layout import Layout
from terrace.plan.validate import num_micro_batches
from terrace.planner.roles.dataflow import GENERATE, PREPARE, RESHARD, TRAIN, Dataflow, Role
from terrace.planner.roles.placement import IterationReport, PlacedRole, Pool, RolePlacement, price
from terrace.rl.algorithm import NEEDS_CRITIC
from terrace.rl.config import RlConfig

_PHASES = {
    RESHARD: ("reshard",),
    GENERATE: ("generate",),
    PREPARE: ("old_log_prob", "ref", "values", "reward"),
    TRAIN: ("update",),
}


def dataflow_of(config: RlConfig) -> Dataflow:
    """The models of a run and the sizes of its steps; `ModelError` for responses longer than a model has positions."""
    model, run, name = config.model, config.run, config.algorithm.name
    roles = [Role(name="actor", model=model, generates=True, scores=not config.rollout_is_exact, trains=True)]
    if run.reference:
        roles.append(Role(name="reference", model=model, scores=True))
    critics = ("critic", "cost critic") if name == "safe-rlhf" else ("critic",) if name in NEEDS_CRITIC else ()
    of_values = replace(model, scalar_head=True)
    roles += [Role(name=critic, model=of_values, scores=True, trains=True) for critic in critics]
    named = {f"reward {index}": reward for index, reward in enumerate(config.reward)}
    for each, reward in (named | ({} if config.cost is None else {"cost": config.cost})).items():
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
    )


def placement_of(config: RlConfig) -> RolePlacement:
    """Where a run has its roles: all on all ranks, under one plan."""
    # A step that does not divide is refused here, before anything is priced.
    num_micro_batches(config.plan, Layout.of(config.cluster, config.plan), config.run.mini_batch)
    roles = (
        PlacedRole(name=role.name, plan=config.plan, rows=config.run.rows if role.generates else 0)
        for role in dataflow_of(config).roles
    )
    return RolePlacement(pools=(Pool(devices=config.cluster.world_size, roles=tuple(roles)),))


def stages_of(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Seconds of a step by stage as a run measured them (`time/...`): the mean of its steps but the first, if any."""
    steady = metrics[1:] or metrics
    return {
        stage: sum(found.get(f"time/{phase}", 0.0) for found in steady for phase in phases) / len(steady)
        for stage, phases in _PHASES.items()
    }


def predicted(config: RlConfig) -> IterationReport:
    """The predicted iteration of a run; raises `PlanError` for a plan that cannot run."""
    return price(dataflow_of(config), placement_of(config), config.cluster)
