"""`--recompute`: the operations that a search takes or refuses, and that it finds the best of all."""

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES
from terrace.planner.evaluate import step_of
from terrace.planner.operations import parse_operations
from terrace.planner.pins import parse_axes
from terrace.planner.search import units_of
from terrace.planner.space import OpenMesh, Space, placements
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, plan_of
from terrace.simulate.step import predict_step
from tests.support.exhaustive import check_search, cores_of, meshes
from tests.support.mixtures import GROUPED, SHARED, mixture
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, SMALL, adapted, evaluator_of, small_task

TASK = small_task(CLUSTERS["dgx 2x3"], batch=6)
MIXED = replace(TASK, model=mixture(GROUPED))


@pytest.mark.parametrize(
    ("text", "axes", "is_mixture", "said"),
    [
        ("attn", "all", False, "names 'attn', which is no operation of a layer: give attention, mlp, norms joined by"),
        ("mlp,layers", "data", False, "names 'layers', which is no operation of a layer: give attention, mlp, norms"),
        ("mlp,attention", "data,context", False, "attention cannot be recomputed alone with ranks on the context axis"),
        ("norms", "data,tensor", False, "norms cannot be recomputed alone with ranks on the tensor axis"),
        ("mlp", "data", True, "layers.0 is a mixture of experts"),
    ],
)
def test_operations_that_no_search_takes(text: str, axes: str, is_mixture: bool, said: str) -> None:
    with pytest.raises(PlanError, match=re.escape(said)):
        parse_operations(text, (MIXED if is_mixture else TASK).blocks, parse_axes(axes))


def test_operations_of_a_search() -> None:
    assert parse_operations("norms, attention", TASK.blocks, ("data", "pipeline")) == ("attention", "norms")
    assert parse_operations(None, TASK.blocks, AXES) is None
    assert parse_operations("layers", TASK.blocks, AXES) == ()
    assert parse_operations("attention", MIXED.blocks, ("data", "tensor")) == ("attention",)


OPERATIONS_OF_SEARCHES = [
    ("ethernet 2x2", AXES, ("mlp",), 4),
    *nightly(
        ("dgx 2x3", ("data", "pipeline"), ("attention", "mlp", "norms"), 6),
        ("frontier 2x1x2", ("data", "tensor", "pipeline"), ("attention", "mlp"), 4),
    ),
]


@pytest.mark.parametrize(("name", "axes", "operations", "batch"), OPERATIONS_OF_SEARCHES)
def test_the_search_equals_trying_everything_with_operations_in_place_of_layers(
    name: str, axes: tuple[str, ...], operations: tuple[str, ...], batch: int
) -> None:
    check_search(replace(small_task(CLUSTERS[name], batch=batch), operations=operations), axes)


SEARCHED = [
    ("dgx 4x2", ("data",), 8, False),
    ("dgx 2x3", ("data", "pipeline"), 6, False),
    pytest.param("frontier 2x1x2", ("data", "tensor"), 4, False),
    pytest.param("dgx 4x2", ("data",), 8, True, marks=pytest.mark.nightly),
    pytest.param("ethernet 2x2", AXES, 4, False, marks=pytest.mark.nightly),
    pytest.param("frontier 2x1x2", ("data", "tensor", "pipeline"), 4, True, marks=pytest.mark.nightly),
]


@pytest.mark.parametrize(("name", "axes", "batch", "is_mixture"), SEARCHED)
def test_the_search_equals_trying_everything_that_can_be_recomputed(
    name: str, axes: tuple[str, ...], batch: int, is_mixture: bool
) -> None:
    task = replace(small_task(CLUSTERS[name], batch=batch), operations=None)
    everything = check_search(replace(task, model=MIXED.model) if is_mixture else task, axes)
    assert any(each.candidate.first for each in everything)


MODELS = {
    "alike": SMALL,
    "experts": mixture(GROUPED),
    "experts after a dense layer": mixture(GROUPED, dense_layers=(0,), hidden_size=256),
    "experts before dense layers": mixture(SHARED, dense_layers=(2, 3), intermediate_size=512),
}


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_bounds_of_a_number_of_first_layers_never_exceed_the_evaluation(data: st.DataObject) -> None:
    """Bytes and seconds, ascending and descending in the number: a bisection and a search go by both."""
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    task = replace(small_task(CLUSTERS["dgx 2x3"], batch=12, model=model), operations=None)
    if data.draw(st.booleans()):
        task = adapted(task)
    space, evaluator = Space(task=task, axes=("data", "tensor")), evaluator_of(task)
    bounds, mesh = evaluator.bounds, data.draw(st.sampled_from(list(meshes(space))))
    values = task.recomputations.values
    cores = [each for each in cores_of(space, bounds, OpenMesh(mesh)) if values[each.recompute].is_partial]
    core, placement = data.draw(st.sampled_from(cores)), data.draw(st.sampled_from(placements(space, mesh)))
    unit = data.draw(st.sampled_from(units_of(space, core, placement)))
    partly = [bounds.partly(core, first) for first in range(1, len(task.inner))]
    least_bytes = [bounds.least_bytes(each, placement, unit) for each in partly]
    least_s = [bounds.placed_s(each, placement, unit) for each in partly]
    assert least_bytes == sorted({*least_bytes}, reverse=True)
    assert least_s == sorted(least_s)
    for each, own_bytes, own_s in zip(partly, least_bytes, least_s, strict=True):
        candidate = each.candidate(placement, unit)
        assert candidate.first == each.first
        assert own_bytes <= evaluator.needed_bytes(candidate)
        assert own_s <= evaluator.evaluate(candidate).step_s


@pytest.mark.parametrize("mapping", [{}, {"pipeline": (1, 2)}, {"rows": (1, 2)}], ids=str)
def test_operations_are_priced_as_their_plan_is(mapping: dict[str, tuple[int, ...]]) -> None:
    """Seconds and memory of the predicted step of the plan that a candidate is, and less of both than whole layers."""
    whole = small_task(CLUSTERS["ethernet 2x2"], batch=8)
    task = replace(whole, operations=("attention", "mlp"))
    mesh = Mesh.build(2, data=(2, 1), **mapping) if mapping else Mesh.build(2, data=(2, 2))
    schedule = "1f1b" if "pipeline" in mapping else SERIAL
    none, some = (Candidate(again, 1, schedule, 1, 1, Placement(-1, -1, -1), mesh) for again in (0, 1))
    kept, again, layers = (
        evaluator_of(each).played(candidate) for each, candidate in ((task, none), (task, some), (whole, some))
    )
    assert kept.step_s < again.step_s < layers.step_s
    assert kept.needed_bytes > again.needed_bytes > layers.needed_bytes
    plan = plan_of(task, some)
    assert plan.recompute == ("layers.*: attention, mlp",)
    predicted = predict_step(step_of(task, replace(plan, stages=again.stages)))
    assert again.step_s == pytest.approx(predicted.step_s)
    # Orders that rank the search are as close as without recomputation.
    ranks, of_kept = (evaluator_of(task).evaluate(candidate).step_s for candidate in (some, none))
    assert ranks / of_kept == pytest.approx(again.step_s / kept.step_s, rel=0.02)
