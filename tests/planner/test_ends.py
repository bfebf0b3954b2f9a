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
from terrace.planner.delays import LanePrices
from terrace.planner.evaluate import step_of
from terrace.planner.parts import parts_of
from terrace.planner.stages import placement_of, share_differing
from terrace.planner.task import Candidate, Placement, num_micros, plan_of
from terrace.simulate.step import predict_step
from tests.support.differing import differing
from tests.support.exhaustive import check_search
from tests.support.mixtures import PLAIN, mixture
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, evaluator_of, gpt, mesh_of, sized, small_task
from tests.support.state_formula import model_state_bytes

# A head of 200,000 words costs as much as several of these layers.
LARGE_HEAD = gpt(4, 1024, 8, vocab=200_000, positions=512)
SMALL_EXPERTS = replace(PLAIN, intermediate_size=64)


def with_experts(dense_layers: tuple[int, ...] = ()) -> ModelConfig:
    sizes = {"vocab_size": 200_000, "hidden_size": 1024, "intermediate_size": 2048}
    return mixture(SMALL_EXPERTS, layers=4, dense_layers=dense_layers, **sizes)


EXPERTS, DENSE_FIRST = with_experts(), with_experts((0,))
MODELS = {
    "dense": small_task(CLUSTERS["dgx 2x3"], batch=6, model=LARGE_HEAD),
    "experts": small_task(CLUSTERS["dgx 2x3"], batch=6, model=EXPERTS),
    "experts after a dense layer": small_task(CLUSTERS["dgx 2x3"], batch=6, model=DENSE_FIRST),
    "a wide first layer": replace(
        small_task(CLUSTERS["dgx 2x3"], batch=6, model=LARGE_HEAD), declared=differing(LARGE_HEAD)[0]
    ),
}
EVALUATOR = evaluator_of(MODELS["experts"])
EACH = pytest.mark.parametrize("model", MODELS)


@pytest.mark.parametrize("model", ["dense", "experts", *nightly("experts after a dense layer", "a wide first layer")])
def test_the_search_equals_trying_everything_with_stages_without_a_layer(model: str) -> None:
    task = MODELS[model]
    everything = check_search(task, ("data", "pipeline"))
    evaluator = evaluator_of(task)
    layers = {
        tuple(evaluator.bounds.split.num_inner(part.runs) for part in evaluator.stages(each.candidate)[0].parts)
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
    # The ranking's split is that of the programs.
    pipeline, _ = evaluator.stages(candidate)
    held = {
        virtual: sum(number for _, number in runs)
        for row, part in zip(pipeline.orders.placement, pipeline.parts, strict=True)
        for virtual, runs in zip(row, part.chunks, strict=True)
    }
    assert tuple(held[virtual] for virtual in sorted(held)) == stages
    step = step_of(task, replace(plan_of(task, candidate), stages=stages))
    assert predict_step(step).step_s == pytest.approx(played.step_s)
    assert evaluator.evaluate(candidate).step_s == pytest.approx(played.step_s, rel=0.06)


@pytest.mark.parametrize("experts", [((1, 1), (1, 1)), ((2, 1), (1, 1))], ids=["whole", "divided"])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_an_end_without_a_layer_waits_while_it_would_be_idle(
    schedule: str, experts: tuple[tuple[int, int], ...]
) -> None:
    """The table's gradients, reduced after every micro-batch, take longer than its look-ups, and nothing waits."""
    task = small_task(sized("dgx-a100", 4, 3), batch=24, model=EXPERTS)
    mesh = mesh_of((2, 1, 1, 2), (1, 1, 1, 3)).with_experts(*experts)
    candidate, evaluator = Candidate(0, 1, schedule, 1, 2, Placement(-1, 0, 0), mesh), evaluator_of(task)
    ranked, played = evaluator.evaluate(candidate), evaluator.played(candidate)
    assert played.stages == (1,) * 6
    pipeline, stages = evaluator.stages(candidate)
    assert stages[0].unit_s > 1.1 * pipeline.stages_s[0]
    assert ranked.step_s == pytest.approx(played.step_s, rel=0.06)
    assert not evaluator.is_slower(candidate, ranked.step_s)
    assert evaluator.is_slower(candidate, 0.9 * ranked.step_s)


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


@given(
    num_stages=st.sampled_from([2, 3]),
    schedule=st.sampled_from(["1f1b", "zb-h1", "interleaved", "zbv"]),
    num_rows=st.sampled_from([1, 2]),
    layer_s=st.floats(0.01, 1),
    seconds=st.tuples(*[st.lists(st.floats(0, 1), min_size=3, max_size=3).map(tuple)] * 3),
    of_stages=st.booleans(),
)
def test_no_split_has_shorter_delays_of_experts_than_the_least(
    num_stages: int,
    schedule: str,
    num_rows: int,
    layer_s: float,
    seconds: tuple[tuple[float, ...], ...],
    of_stages: bool,
) -> None:
    """Of layers that cost from as much as the logits to a hundredth of it."""
    delays, split = EVALUATOR.bounds.chains.delays, EVALUATOR.bounds.split
    chunks = 2 if schedule in ("interleaved", "zbv") else 1
    mesh = mesh_of((6 // num_stages, num_rows, 1, num_stages)).with_experts((2,), (1,))
    contents = split.contents(
        split.counts([(0.0, 0.0, 0.0), (layer_s, 0.0, 0.0), (1.0, 0.0, 0.0)], num_stages * chunks)
    )
    parts = parts_of(contents, placement_of(schedule, num_stages, chunks))
    prices = LanePrices(*seconds)
    found = delays.of(mesh, schedule, prices, parts, of_stages=of_stages)
    least = delays.at_least(mesh, schedule, chunks, prices, of_stages=of_stages)
    assert least.once_s <= found.once_s
    assert least.each_s <= found.each_s
    assert least.hides == found.hides
