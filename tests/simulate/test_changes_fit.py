"""Changes that are recommended fit into the device's memory, activations included."""

from dataclasses import replace

import pytest

from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.planner.advice import Change, best_change, best_changes, changes
from terrace.planner.evaluate import step_of
from terrace.planner.task import Task
from terrace.simulate.fullest import Job, fullest_stage
from terrace.simulate.step import Step, predict_step
from tests.support.nightly import every
from tests.support.planner_cases import gpt, sized

TASK = Task(model=gpt(8, 1024, 16), cluster=sized("dgx-a100", 4, 2), batch=64, sequence=1024)
PLANS = (
    preset("zero3", TASK.cluster),
    preset("zero1", TASK.cluster),
    replace(preset("zero1", TASK.cluster), mapping={"node": {"pipeline": 4}}, schedule="1f1b"),
)


def needed(step: Step) -> int:
    job = Job(cluster=step.cluster, plan=step.plan, num_micros=step.num_micros)
    return sum(fullest_stage(job, step.blocks, step.sequence)[1].values())


def recomputing(plan: Plan, memory_bytes: float) -> Step:
    cluster = replace(TASK.cluster, device=replace(TASK.cluster.device, memory_bytes=memory_bytes, headroom="0%"))
    changed = replace(plan, compute="bf16", micro_batch=4, recompute=("layers.*",))
    return step_of(replace(TASK, cluster=cluster), changed)


def after(step: Step, change: Change) -> int:
    return needed(predict_step(replace(step, cluster=change.cluster, plan=change.plan)).step)


@pytest.mark.parametrize("plan", every(2, PLANS), ids=["zero3", "zero1", "pipeline"])
def test_changes_need_no_more_than_the_device_has(plan: Plan) -> None:
    roomy = recomputing(plan, 80e9)
    every = changes(roomy)
    again = next(change for change in every if change.words == "recompute = []")
    tight = recomputing(plan, after(roomy, again) - 1)
    assert needed(tight) < tight.cluster.device.memory_bytes
    found = changes(tight)
    assert "recompute = []" not in {change.words for change in found}
    for change in found:
        assert after(tight, change) <= tight.cluster.device.memory_bytes
    # All that is left out needs more.
    kept = {change.words for change in found}
    for change in every:
        assert (change.words in kept) == (after(roomy, change) <= tight.cluster.device.memory_bytes)


def test_the_best_change_is_the_best_of_those_that_fit() -> None:
    roomy = recomputing(PLANS[0], 80e9)
    (best,) = (change for change in best_changes(roomy, predict_step(roomy)) if change.kind == "plan")
    assert best.words == "recompute = []"
    tight = recomputing(PLANS[0], after(roomy, best) - 1)
    base = predict_step(tight)
    (second,) = (change for change in best_changes(tight, base) if change.kind == "plan")
    assert second.words != "recompute = []"
    assert second == best_change(changes(tight, base), base.step_s, "plan")


def test_where_the_plan_does_not_fit_changes_may_need_as_much() -> None:
    roomy = recomputing(PLANS[0], 80e9)
    small = recomputing(PLANS[0], needed(roomy) - 1)
    found = changes(small)
    assert {change.kind for change in found} == {"plan", "cluster"}
    assert max(after(small, change) for change in found) <= needed(small)
