"""The search over divisions of experts: equal to trying everything, and inside the node where links are unequal."""

from dataclasses import replace

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.presets import load_cluster
from terrace.model.config import ModelConfig
from terrace.plan.mesh import Mesh
from terrace.plan.search_limits import MOST_PLAYED
from terrace.planner.divisions import stack_forms
from terrace.planner.explain import reasons
from terrace.planner.pins import parse_pins
from terrace.planner.search import find
from terrace.planner.space import Space
from terrace.planner.task import Task, plan_of
from terrace.planner.unsatisfied import unsatisfied
from terrace.report.plans import plan_words
from tests.support.exhaustive import check_search, meshes
from tests.support.mixtures import MIXTRAL, QWEN3_30B
from tests.support.nightly import nightly
from tests.support.planner_cases import CLUSTERS, MIXED, SMALL, small_task


@pytest.mark.parametrize(
    ("name", "axes", "batch"),
    [
        pytest.param("dgx 4x2", ("data",), 8, marks=pytest.mark.nightly),
        ("dgx 4x2", ("data", "tensor"), 4),
        pytest.param("frontier 2x1x2", ("data", "tensor", "pipeline"), 4, marks=pytest.mark.nightly),
        pytest.param("ethernet 2x2", ("data", "tensor", "context", "pipeline"), 4, marks=pytest.mark.nightly),
        ("frontier 2x1x2", ("data", "pipeline"), 4),
        pytest.param("frontier 2x1x2", ("data", "pipeline"), 8, marks=pytest.mark.nightly),
        pytest.param("ethernet 2x2", ("data", "context", "pipeline"), 4, marks=pytest.mark.nightly),
    ],
)
def test_the_search_is_near_trying_everything(name: str, axes: tuple[str, ...], batch: int) -> None:
    everything = check_search(small_task(CLUSTERS[name], batch=batch, model=MIXED), axes)
    # Both searches would agree on nothing, too.
    divided = [each.candidate.mesh for each in everything if each.candidate.mesh.divides_stacks]
    for axis in axes:
        assert any(mesh.total(axis) > 1 for mesh in divided), axis


@pytest.mark.nightly
def test_the_search_does_with_attention_in_place_of_layers() -> None:
    """On several ranks experts are priced apart, and so is the recomputation of their layers."""
    task = small_task(CLUSTERS["dgx 4x2"], batch=4, model=MIXED)
    check_search(replace(task, operations=("attention",)), ("data", "tensor"))


def test_divisions_of_experts() -> None:
    """8 experts of inner size 40: rows on the innermost tier, experts around them, tier by tier."""
    space = Space(task=small_task(CLUSTERS["dgx 4x2"], model=MIXED))
    whole = Mesh.build(2, data=(4, 2))
    found = {whole.with_stacks(*form).stack_degrees for form in stack_forms(space.task, space.pins, whole)}
    assert found == {(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (1, 4), (2, 4)}
    tables = [
        whole.with_stacks(*form).stack_table(["node", "system"]) for form in stack_forms(space.task, space.pins, whole)
    ]
    assert {"node": {"rows": 2, "expert": 2}, "system": {"expert": 2}} in tables
    assert {"system": {"expert": 2}} not in tables
    assert {mesh.apart for mesh in meshes(Space(task=small_task(CLUSTERS["dgx 4x2"], model=SMALL)))} == {None}


def test_pins_of_experts() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], model=MIXED)
    pins = parse_pins(["expert=4", "expert_rows=1"], task.cluster, ())
    found, _ = find(Space(task=task, axes=("data",), pins=pins), count=1)
    assert plan_of(task, found.best[0].candidate).experts == {"node": {"expert": 4}}
    assert plan_words(task, found.best[0].candidate).endswith("experts node expert 4")
    with pytest.raises(PlanError, match="expert_row"):
        parse_pins(["expert_row=1"], task.cluster, ())
    dense = Space(task=small_task(CLUSTERS["dgx 4x2"], model=SMALL), pins=pins)
    assert not list(meshes(dense))


@pytest.mark.parametrize(
    ("model", "alternative"),
    [(QWEN3_30B, "system expert 8"), *nightly((MIXTRAL, "node expert 4, system expert 2"))],
)
def test_experts_stay_inside_the_node(model: ModelConfig, alternative: str) -> None:
    """On eight nodes of eight; the seconds of the next tier are among the changes."""
    task = Task(model=model, cluster=load_cluster("dgx-h100").resized(8), batch=256, sequence=4096)
    space = Space(task=task)
    found, evaluator = find(space, count=1)
    best = found.best[0]
    assert plan_of(task, best.candidate).experts.keys() == {"node"}
    near = {change.words: change for change in reasons(space, evaluator, best.candidate)}
    moved = near[f"experts = {alternative}"].cost
    assert moved is not None
    assert moved.step_s > 1.02 * best.step_s
    assert "experts = none" in near


@pytest.mark.nightly
@pytest.mark.parametrize(("model", "best_s"), [(MIXTRAL, 0.3319), (QWEN3_30B, 0.3785)])
def test_experts_among_16384_devices_take_few_plays(model: ModelConfig, best_s: float) -> None:
    task = Task(model=model, cluster=load_cluster("dgx-h100").resized(2048), batch=4096, sequence=4096)
    found, _ = find(Space(task=task))
    assert found.num_played <= MOST_PLAYED
    assert min(each.step_s for each in found.best) < 1.005 * best_s


@pytest.mark.parametrize(
    ("pinned", "said"),
    [
        (["expert=3"], "expert = 3 does not divide the 8 experts of a layer; expert can be 1, 2, 4 or 8"),
        (["expert>=16"], "expert = 16 does not divide the 8 experts of a layer; expert can be 1, 2, 4 or 8"),
        (["expert_rows=3"], "does not divide the inner size of an expert, 40; expert_rows can be 1, 2 or 4"),
        (["expert_rows=8"], "an expert are on the innermost tier alone; expert_rows can be 1, 2 or 4"),
        (["expert=8", "expert_rows=4"], "beside the other pins expert can be 1 or 2"),
        (["expert=8", "pipeline=2"], "beside the other pins expert can be 1, 2 or 4"),
        (["columns=2"], "columns = 2: a token must be whole where its experts are chosen; columns can be 1"),
        (["pipeline=8"], "more than the 4 layers, embedding and head; pipeline can be 1, 2 or 4"),
        (["data=16"], "data = 16 does not divide the 8 sequences of a step; data can be 1, 2, 4 or 8"),
        (
            ["micro_batch=3"],
            "does not divide the 8 sequences of a step; micro_batch can be 1, 2, 4 or 8",
        ),
        (["expert=2"], ""),
    ],
)
def test_pins_that_no_plan_satisfies_say_why(pinned: list[str], said: str) -> None:
    task = small_task(CLUSTERS["dgx 4x2"], model=MIXED)
    found = unsatisfied(Space(task=task, pins=parse_pins(pinned, task.cluster, ())))
    assert found.endswith(said) if said else not found


def test_a_pin_on_experts_of_a_dense_model_says_so() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], model=SMALL)
    found = unsatisfied(Space(task=task, pins=parse_pins(["expert=2"], task.cluster, ())))
    assert found == "expert = 2: no layer of this model has experts; expert can be 1"
