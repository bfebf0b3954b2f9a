"""Whether the documents of a task are better dealt to ranks by cost (`balance = "cost"`).

The closed prices of a search know nothing of it, so the best plans of a search are played with it; they are those with
the shortest steps under even chunks.
"""

from collections.abc import Sequence
from dataclasses import replace

from terrace.base.errors import PlanError
from terrace.base.words import counted, seconds
from terrace.plan.plan import Plan
from terrace.planner.advice import cost_of
from terrace.planner.evaluate import step_of
from terrace.planner.members import Deal
from terrace.planner.ranking import TIE, Estimate
from terrace.planner.task import Task
from terrace.simulate.step import predict_step


def by_cost(task: Task, plans: Sequence[tuple[Plan, Estimate]]) -> tuple[Deal | None, str]:
    """The fastest of the plans with `balance = "cost"`, if faster than all without, and a line that says why.

    `plans` are the best ones with their estimates, the first of which is the best.
    """
    even_s, best, reasons = plans[0][1].step_s, None, list[str]()
    for plan, estimate in plans:
        try:
            predicted = predict_step(step_of(task, replace(plan, balance="cost")))
        except PlanError as error:
            reasons.append(str(error))
            continue
        cost = cost_of(predicted)
        if cost.needed_bytes > task.cluster.device.usable_bytes:
            reasons.append("a rank may have to attend to three even shares of the tokens, which do not fit")
            continue
        if best is None or predicted.step_s < best.estimate.step_s:
            sent = max(predicted.expected_bytes, key=lambda each: sum(each.values()))
            found = replace(
                estimate,
                step_s=predicted.step_s,
                time_s=cost.time_s,
                memory_bytes=cost.memory_bytes,
                sent_bytes={(message.value, tier): size for (message, tier), size in sent.items()},
            )
            best = Deal(
                task=task,
                plan=predicted.step.plan,
                estimate=found,
                prediction=predicted,
                even_s=even_s,
                waits_s=(),
            )
    if best is None:
        return None, f'balance = "cost" is left out: {reasons[0]}'
    gain = f"a step of {seconds(best.estimate.step_s)} against {seconds(even_s)} without"
    if best.estimate.step_s >= (1 - TIE) * even_s:
        return None, f'balance = "cost" is left out, as it gains nothing: the best of {_of(plans)} has {gain}'
    return best, f'balance = "cost" deals the documents of all data ranks to ranks by cost: {gain} (of {_of(plans)})'


def _of(plans: Sequence[tuple[Plan, Estimate]]) -> str:
    return counted(len(plans), "plan")
