"""Models of which a part is frozen: the search prices them as their programs are, and bounds them from below."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.model.blocks import block_specs
from terrace.model.spec import freeze
from terrace.planner.evaluate import TIE
from terrace.planner.search import units_of
from terrace.planner.space import OpenMesh, Space, placements
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task
from tests.support.exhaustive import check_search, cores_of, meshes
from tests.support.mixtures import GROUPED, SHARED, mixture
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, SMALL, adapted, evaluator_of, mesh_of, small_task

MODELS = {
    "alike": SMALL,  # its head is tied
    "experts": mixture(GROUPED),
    "differing": mixture(SHARED, dense_layers=(2, 3), intermediate_size=512),
}
EMBEDDING, LAYERS, ROUTED = ("embedding.*",), ("layers.*",), ("layers.*.mlp.*",)
SOME_LAYERS = ("embedding.*", "layers.[01].*")


def frozen_task(model: str, patterns: tuple[str, ...], cluster: str = "dgx 2x3", batch: int = 12) -> Task:
    """Adapters alone train without patterns; with them, the parameters that match none."""
    task = small_task(CLUSTERS[cluster], batch=batch, model=MODELS[model])
    return replace(task, declared=freeze(block_specs(task.model), patterns)) if patterns else adapted(task)


@pytest.mark.parametrize(
    ("model", "patterns"),
    [
        ("alike", ()),
        ("alike", EMBEDDING),
        ("alike", LAYERS),
        ("alike", SOME_LAYERS),
        ("experts", ()),
        ("experts", ROUTED),
        ("differing", ()),
    ],
)
def test_a_search_prices_frozen_matrices_as_their_program_does(model: str, patterns: tuple[str, ...]) -> None:
    """The step is as long as the plan's, and shorter than if all trained."""
    task = frozen_task(model, patterns)
    evaluator, of_whole = evaluator_of(task), evaluator_of(replace(task, declared=()))
    for mesh in meshes(Space(task=task, axes=("data", "tensor"))):
        for placement in (Placement(-1, -1, -1), Placement(1, 1, 1)):
            candidate = Candidate(0, 1, SERIAL, 1, 1, placement, mesh)
            found_s = evaluator.evaluate(candidate).step_s
            assert found_s == pytest.approx(evaluator.played(candidate).step_s)
            assert found_s < of_whole.evaluate(candidate).step_s


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_bounds_never_exceed_the_evaluation(data: st.DataObject) -> None:
    model = data.draw(st.sampled_from(sorted(MODELS)))
    patterns = data.draw(st.sampled_from([(), EMBEDDING, LAYERS, SOME_LAYERS, ROUTED]))
    task = frozen_task(model, patterns, data.draw(st.sampled_from(["dgx 2x3", "frontier 2x2x2"])), 24)
    space, evaluator = Space(task=task), evaluator_of(task)
    bounds, mesh = evaluator.bounds, data.draw(st.sampled_from(list(meshes(space))))
    core = data.draw(st.sampled_from(list(cores_of(space, bounds, OpenMesh(mesh)))))
    placement = data.draw(st.sampled_from(placements(space, mesh)))
    unit = data.draw(st.sampled_from(units_of(space, core, placement)))
    try:
        played = core if core.played else bounds.play(core)
        estimate = evaluator.evaluate(played.candidate(placement, unit))
    except PlanError:
        return
    for each in (core, bounds.tightened(core), played):
        assert bounds.placed_s(each, placement, unit) <= estimate.step_s
        assert bounds.least_bytes(each, placement, unit) <= estimate.needed_bytes


@pytest.mark.parametrize(
    ("model", "patterns", "axes"),
    [
        ("alike", (), ("data", "pipeline")),
        *nightly(
            ("alike", LAYERS, ("data", "pipeline")),
            ("alike", SOME_LAYERS, ("data", "tensor", "pipeline")),
            ("experts", ROUTED, ("data", "tensor")),
        ),
    ],
)
def test_the_search_equals_trying_everything(model: str, patterns: tuple[str, ...], axes: tuple[str, ...]) -> None:
    check_search(frozen_task(model, patterns, batch=6), axes)


@pytest.mark.parametrize(("schedule", "chunks", "unit"), [("1f1b", 1, 1), ("zeropp", 2, 2)])
def test_stages_exchange_and_reduce_gradients_of_what_trains_alone(schedule: str, chunks: int, unit: int) -> None:
    """A stage alone reduces as its plan does, and a frozen tied matrix sends no gradient."""
    mesh = mesh_of((2, 1, 1, 1), (1, 1, 1, 2))
    candidate = Candidate(0, unit, schedule, chunks, 1, Placement(-1, -1, -1), mesh)
    tasks = small_task(CLUSTERS["ethernet 2x2"], batch=16), frozen_task("alike", (), "ethernet 2x2", 16)
    evaluators = [evaluator_of(task) for task in tasks]
    for evaluator, is_tied in zip(evaluators, (True, False), strict=True):
        shown, lines = evaluator.played(candidate), evaluator.lines(candidate)
        assert any(TIE in line for line in lines) == is_tied
        assert any(message == "tie" for message, _ in shown.sent_bytes) == is_tied
        updates = [line["update"] for line in lines if "update" in line]
        assert max(updates) == pytest.approx(shown.time_s["update"], rel=0.05)
        if schedule == "1f1b":
            assert evaluator.evaluate(candidate).step_s == pytest.approx(shown.step_s, rel=0.05)
    whole_s, frozen_s = (
        max(line.get("wait sync", 0.0) for line in evaluator.lines(candidate)) for evaluator in evaluators
    )
    assert 0 < frozen_s < 0.5 * whole_s


def test_experts_that_do_not_train_have_no_states_in_a_bound() -> None:
    task = frozen_task("experts", (), batch=6)
    space, evaluator = Space(task=task, axes=("data",)), evaluator_of(task)
    divided = [mesh for mesh in meshes(space) if mesh.divides_stacks]
    assert divided
    for mesh in divided:
        (core, *_) = cores_of(space, evaluator.bounds, OpenMesh(mesh))
        for placement in placements(space, mesh):
            candidate = core.candidate(placement, 1)
            assert evaluator.bounds.least_bytes(core, placement, 1) <= evaluator.needed_bytes(candidate)
