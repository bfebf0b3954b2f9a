"""Virtual stages without a layer: the head alone on the last, the embedding alone on the first."""

from dataclasses import replace

import pytest

from terrace.plan.mesh import Mesh
from terrace.planner.evaluate import step_of
from terrace.planner.task import Candidate, Placement, plan_of
from terrace.simulate.step import predict_step
from tests.support.exhaustive import check_search
from tests.support.planner_cases import CLUSTERS, evaluator_of, gpt, small_task

# A head of 200,000 words costs as much as several of these layers.
LARGE_HEAD = gpt(4, 1024, 8, vocab=200_000, positions=512)
TASK = small_task(CLUSTERS["dgx 2x3"], batch=6, model=LARGE_HEAD)


def test_the_search_equals_trying_everything_with_stages_without_a_layer() -> None:
    everything = check_search(TASK, ("data", "pipeline"))
    evaluator = evaluator_of(TASK)
    layers = {
        tuple(evaluator.bounds.split.num_inner(part.runs) for part in evaluator.stages(each.candidate)[0].parts)
        for each in everything
        if each.candidate.mesh.total("pipeline") > 1 and each.candidate.chunks == 1
    }
    # With as many stages as blocks each end is one; else the head is alone where that is faster.
    assert (0, 1, 1, 1, 1, 0) in layers
    assert (4, 0) in layers


@pytest.mark.parametrize("num_stages", [3, 6])
def test_a_stage_without_a_layer_is_predicted_as_its_plan_is(num_stages: int) -> None:
    pipeline = {3: (1, 3), 6: (2, 3)}[num_stages]
    mesh = Mesh.build(
        2, data=tuple(size // each for size, each in zip((2, 3), pipeline, strict=True)), pipeline=pipeline
    )
    candidate = Candidate(0, 1, "1f1b", 1, 1, Placement(-1, -1, -1), mesh)
    evaluator = evaluator_of(TASK)
    played = evaluator.played(candidate)
    assert played.stages == {3: (3, 2, 1), 6: (1,) * 6}[num_stages]
    # The ranking's split is that of the programs.
    parts = evaluator.stages(candidate)[0].parts
    assert tuple(len(part.kinds) for part in parts) == played.stages
    step = step_of(TASK, replace(plan_of(TASK, candidate), stages=played.stages))
    assert predict_step(step).step_s == pytest.approx(played.step_s)
    assert evaluator.evaluate(candidate).step_s == pytest.approx(played.step_s, rel=0.06)
