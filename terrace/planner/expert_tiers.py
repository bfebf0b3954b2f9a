"""Alternatives that explain a plan's experts: one tier further out, tokens in one chunk, and chunks in another
order.
"""

from dataclasses import dataclass, replace
from typing import Any

from terrace.base.errors import PlanError
from terrace.base.words import counted
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire_rules import crossing
from terrace.planner.divisions import one_tier_out, table_words
from terrace.simulate.chunks import Numbers
from terrace.simulate.step import Prediction, Step, predict_step
from terrace.simulate.work import Work


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another division of experts, or other chunks, with its step, or the reason why it cannot run."""

    what: str
    prediction: Prediction | None = None
    reason: str = ""


def alternatives(step: Step) -> list[Alternative]:
    """The step with tokens in one chunk, with chunks in another order, and with experts one tier further out.

    The plan must name its chunks.
    """
    plan, tiers = step.plan, [tier.name for tier in step.cluster.tiers]
    numbers, found = Numbers(**plan.expert_chunks), []
    if numbers.pieces > 1:
        changed = _changed(plan, expert_chunks=Numbers().table)
        found.append(_alternative("with tokens in one chunk", step, changed))
    if numbers.pieces > 2 and plan.expert_hops > 1:
        ahead = numbers.pieces - 1 if numbers.ahead == 1 else 1
        changed = replace(plan, expert_chunks=numbers._replace(ahead=ahead).table)
        found.append(_alternative(f"with {counted(ahead, 'chunk')} ahead", step, changed))
    further = one_tier_out(Mesh.of(step.cluster, plan))
    if further is not None:
        table = further.stack_table(tiers)
        moved = crossing(step.cluster, _changed(plan, experts=table, expert_chunks={}))
        found.append(_alternative(f"with experts one tier out ({table_words(table)})", step, moved))
    return found


def _changed(plan: Plan, **changes: Any) -> Plan:
    # Shares of gradients depend on the number of chunks, so they are searched again.
    return replace(plan, **changes, expert_gaps="auto" if plan.expert_gaps else ())


def _alternative(what: str, step: Step, plan: Plan) -> Alternative:
    work, (expert, rows) = step.work, Mesh.of(step.cluster, plan).stack_degrees
    if isinstance(work, Work):
        work = replace(work, expert=expert, expert_rows=rows)
    try:
        return Alternative(what=what, prediction=_predicted(replace(step, plan=plan, work=work)))
    except PlanError as error:
        return Alternative(what=what, reason=str(error))


def _predicted(step: Step) -> Prediction:
    try:
        return predict_step(step)
    except PlanError:
        if not step.plan.expert_gaps:
            raise
        # Experts further out may not share a lane with gradients.
        return predict_step(replace(step, plan=replace(step.plan, expert_gaps=())))
