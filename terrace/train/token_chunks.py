"""Chooses the token chunks of expert messages for the plan of a user's own script."""

from collections.abc import Sequence

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import operations_of
from terrace.model.spec import BlockSpec
from terrace.plan.counts import num_choices
from terrace.plan.plan import EXPERT_CHUNKS, Plan
from terrace.plan.validate import validate
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, with_chunks


def resolved_plan(
    cluster: Cluster,
    plan: Plan,
    blocks: Sequence[BlockSpec],
    num_micros: int,
    activation: tuple[int, int] | None,
) -> tuple[Plan, str]:
    """Fills in the expert chunks that a plan leaves out, using the cluster's constants and `plan.micro_batch`. Returns
    the plan and a note.

    Without `activation` (sequence, hidden) they stay left out, which means one chunk, and the note says so. Raises
    `PlanError` for a plan that does not suit the cluster or the blocks, and `ClusterError` for a dtype that the device
    has no rate for.
    """
    if plan.finds_gaps:
        raise PlanError('expert_gaps = "auto" is for commands: give a Trainer the shares that terrace simulate prints')
    validate(cluster, plan, blocks)
    missing = [name for name in EXPERT_CHUNKS if name not in plan.expert_chunks]
    if not plan.experts or not missing or not any(map(num_choices, blocks)):
        return plan, ""
    if activation is None:
        key = "expert_chunks" if len(missing) == len(EXPERT_CHUNKS) else f"expert_chunks.{missing[0]}"
        return plan, f"{key} is left out and counts as 1; give activation=(sequence, hidden) to have it chosen"
    sequence = activation[0]
    step = Step(
        cluster=cluster,
        plan=plan,
        blocks=tuple(blocks),
        num_micros=num_micros,
        sequence=sequence,
        work=work_of(cluster, plan, operations_of(blocks), sequence),
    )
    return with_chunks(step).plan, ""
