"""Virtual stages without a layer: the head alone on the last, the embedding alone on the first."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.model.config import ModelConfig
from terrace.plan.mesh import Mesh
from terrace.plan.slices import slice_blocks
from terrace.planner.evaluate import step_of
from terrace.planner.stages import share_differing
from terrace.planner.task import Candidate, Placement, num_micros, plan_of
from terrace.simulate.step import predict_step
from tests.support.differing import differing
from tests.support.exhaustive import check_search
from tests.support.mixtures import PLAIN, mixture
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, evaluator_of, gpt, small_task
from tests.support.state_formula import model_state_bytes

# A head of 200,000 words costs as much as several of these layers.
LARGE_HEAD = gpt(4, 1024, 8, vocab=200_000, positions=512)
SMALL_EXPERTS = replace(PLAIN, intermediate_size=64)


def with_stacks(dense_layers: tuple[int, ...] = ()) -> ModelConfig:
    sizes = {"vocab_size": 200_000, "hidden_size": 1024, "intermediate_size": 2048}
    return mixture(SMALL_EXPERTS, layers=4, dense_layers=dense_layers, **sizes)


EXPERTS, DENSE_FIRST = with_stacks(), with_stacks((0,))
MODELS = {
    "dense": small_task(CLUSTERS["dgx 2x3"], batch=6, model=LARGE_HEAD),
    "experts": small_task(CLUSTERS["dgx 2x3"], batch=6, model=EXPERTS),
    "experts after a dense layer": small_task(CLUSTERS["dgx 2x3"], batch=6, model=DENSE_FIRST),
    "a wide first layer": replace(
        small_task(CLUSTERS["dgx 2x3"], batch=6, model=LARGE_HEAD), declared=differing(LARGE_HEAD)[0]
    ),
}
EACH = pytest.mark.parametrize("model", MODELS)


@pytest.mark.parametrize("model", ["dense", "experts", *nightly("experts after a dense layer", "a wide first layer")])
def test_the_search_is_near_trying_everything_with_stages_without_a_layer(model: str) -> None:
    task = MODELS[model]
    everything = check_search(task, ("data", "pipeline"))
    prices = evaluator_of(task).prices
    layers = {
        tuple(map(prices.split.num_inner, prices.contents(each.candidate)))
        for each in everything
        if each.candidate.mesh.total("pipeline") > 1 and each.candidate.chunks == 1
    }
    # With as many stages as blocks each end is one; else the head is alone where that is faster.
    assert (0, 1, 1, 1, 1, 0) in layers
    assert {(4, 0), (2, 2, 0)} & layers


def candidate_of(num_stages: int, schedule: str = "1f1b", chunks: int = 1) -> Candidate:
    pipeline = {2: (2, 1), 3: (1, 3), 6: (2, 3)}[num_stages]
    data = tuple(size // each for size, each in zip((2, 3), pipeline, strict=True))
    mesh = Mesh.build(2, data=data, pipeline=pipeline)
    return Candidate(0, 1, schedule, chunks, 1, Placement(-1, -1, -1), mesh)


@EACH
@pytest.mark.parametrize(
    ("num_stages", "schedule", "chunks", "stages"),
    [(3, "1f1b", 1, (3, 2, 1)), (6, "zb-h1", 1, (1,) * 6), (3, "interleaved", 2, (1,) * 6), (3, "zbv", 2, (1,) * 6)],
)
def test_a_stage_without_a_layer_is_predicted_as_its_plan_is(
    model: str, num_stages: int, schedule: str, chunks: int, stages: tuple[int, ...]
) -> None:
    task, candidate = MODELS[model], candidate_of(num_stages, schedule, chunks)
    evaluator = evaluator_of(task)
    played = evaluator.played(candidate)
    assert played.stages == stages
    # The price's split is that of the programs.
    contents = evaluator.prices.contents(candidate)
    assert tuple(sum(number for _, number in runs) for runs in contents) == stages
    step = step_of(task, replace(plan_of(task, candidate), stages=stages))
    assert predict_step(step).step_s == pytest.approx(played.step_s)
    assert evaluator.prices.step_s(candidate) == pytest.approx(played.step_s, rel=0.08)


@EACH
@pytest.mark.parametrize("num_stages", [3, 6])
def test_the_memory_of_stages_without_a_layer_is_the_exact_account_of_the_fullest(model: str, num_stages: int) -> None:
    task, candidate = MODELS[model], candidate_of(num_stages)
    shown, plan = evaluator_of(task).played(candidate), plan_of(task, candidate)
    programs = predict_step(step_of(task, plan)).programs
    states = [
        model_state_bytes(
            task.cluster, each.plan, slice_blocks(task.blocks, each.mesh), num_micros(task, candidate), 256, each.stage
        )
        for each in programs
    ]
    names = ("params", "grads", "optimizer")
    assert {name: shown.memory_bytes[name] for name in names} in [
        {name: each[name] for name in names} for each in states
    ]


@given(
    costs=st.lists(st.integers(1, 9), min_size=3, max_size=8).map(tuple),
    num_virtual=st.integers(2, 8),
    ends=st.integers(0, 2),
)
def test_layers_that_differ_are_shared_as_well_as_they_can_be(
    costs: tuple[int, ...], num_virtual: int, ends: int
) -> None:
    num_layers = len(costs) - 2
    if num_virtual > num_layers + ends:
        with pytest.raises(PlanError, match=f"{num_virtual} virtual stages of {num_layers} layers: use at most one a"):
            share_differing(costs, num_virtual, ends)
        return
    counts = share_differing(costs, num_virtual, ends)
    assert sum(counts) == num_layers
    assert counts[0] >= (num_virtual != num_layers + 2)
    assert min(counts[1:-1], default=1) >= 1
    assert counts[-1] >= (ends == 0)
    # Look-ups are with the first layer, where there are not stages enough for both.
    first = 0 if num_virtual == num_layers + 2 else 1
    cuts = range(first, num_layers + (1 if ends else 0))
    ways = [
        _parts(costs, (0, *(cut + 1 for cut in chosen), len(costs))) for chosen in combinations(cuts, num_virtual - 1)
    ]
    stops = [1 + sum(counts[: index + 1]) for index in range(num_virtual - 1)]
    found = _parts(costs, (0, *stops, len(costs)))
    assert max(found) == min(map(max, ways))


def _parts(costs: Sequence[int], bounds: Sequence[int]) -> list[int]:
    return [sum(costs[start:stop]) for start, stop in pairwise(bounds)]
