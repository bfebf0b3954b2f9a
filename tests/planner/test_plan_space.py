"""The space of the planner: tasks, mapping tables, placements, pins, axes, layers of stages, schedules."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ModelError, PlanError
from terrace.cluster.presets import load_cluster
from terrace.plan.mesh import ORDER, Mesh
from terrace.plan.plan import AXES
from terrace.plan.validate import validate
from terrace.planner.pins import parse_axes, parse_pins
from terrace.planner.ranking import TIE
from terrace.planner.search import find
from terrace.planner.space import Space, placements
from terrace.planner.stages import SERIAL, share_layers, traits
from terrace.planner.task import Candidate, Placement, Task, plan_of
from terrace.planner.verdicts import refusal
from terrace.program.schedules.registry import schedule_names
from tests.support.exhaustive import meshes
from tests.support.mixtures import mixture
from tests.support.planner_cases import CLUSTERS, SMALL, gpt, mesh_of, sized, small_task


def test_rows_multiply_to_the_tiers_and_tensor_takes_whole_tiers() -> None:
    task = small_task(sized("frontier", 2, 4, 4), batch=64, model=gpt(8, 512, 32, vocab=1000))
    found = list(meshes(Space(task=task)))
    assert len(set(found)) == len(found) > 50
    for mesh in found:
        assert mesh.group(*ORDER) == tuple(tier.size for tier in task.cluster.tiers)
        tensor = mesh.group("tensor")
        for tier, outer in enumerate(tensor[1:]):
            assert outer == 1 or tensor[tier] == task.cluster.tiers[tier].size
        assert mesh.total("pipeline") <= 8
        assert task.batch % mesh.total("data") == 0
        assert 32 % mesh.total("tensor") == 0


def test_columns_are_innermost_powers_of_two_and_only_there_by_a_pin() -> None:
    task = small_task(sized("frontier", 2, 4, 4), batch=64, model=gpt(8, 512, 32, vocab=1000))
    assert all(mesh.total("columns") == 1 for mesh in meshes(Space(task=task)))
    pins = parse_pins(["columns<=4"], task.cluster, [])
    found = [mesh for mesh in meshes(Space(task=task, pins=pins)) if mesh.total("columns") > 1]
    assert {mesh.total("columns") for mesh in found} == {2, 4}
    for mesh in found:
        columns, tensor = mesh.group("columns"), mesh.group("tensor")
        for tier, outer in enumerate(columns[1:]):
            assert outer == 1 or columns[tier] == tensor[tier]
        candidate = Candidate(0, 1, SERIAL, 1, 1, Placement(-1, -1, -1), mesh)
        assert Mesh.of(task.cluster, plan_of(task, candidate)) == mesh
    exact = parse_pins(["columns=2", "tensor=4"], task.cluster, [])
    chosen = list(meshes(Space(task=task, pins=exact)))
    assert chosen
    assert {(mesh.total("columns"), mesh.total("tensor")) for mesh in chosen} == {(2, 4)}


def test_placements_are_ordered_distinct_and_all_there() -> None:
    task = small_task(CLUSTERS["frontier 2x1x2"])
    space = Space(task=task, axes=("data",))
    (mesh,) = meshes(space)
    found = placements(space, mesh)
    tiers = task.cluster.tiers
    spans = {
        tuple(1 if place < 0 else math.prod(tier.size for tier in tiers[: place + 1]) for place in each)
        for each in found
    }
    assert (
        len(spans) == len(found) == 11
    )  # params <= grads <= optimizer of 1, 2 and 4 ranks: 10; a copy inside params of 4: 1
    for each in found:
        assert each.params <= each.grads <= each.optimizer
        assert each.backward < max(each.params, 0)
        candidate = Candidate(0, 1, SERIAL, 1, 1, each, mesh)
        validate(task.cluster, plan_of(task, candidate), task.blocks)


def test_pins_hold_in_all_that_is_found() -> None:
    cluster = CLUSTERS["frontier 2x2x2"]
    task = small_task(cluster)
    texts = ["tensor=2", "pipeline<=2", "params=package", "optimizer>=node", "micro_batch=1", "recompute=layers"]
    pins = parse_pins(texts, cluster, schedule_names())
    found, _ = find(Space(task=task, pins=pins), count=3)
    assert found.best
    for each in found.best:
        assert each.candidate.mesh.total("tensor") == 2
        assert each.candidate.mesh.total("pipeline") <= 2
        plan = plan_of(task, each.candidate)
        assert (plan.params, plan.micro_batch, plan.recompute) == ("package", 1, ("layers.*",))
        assert plan.optimizer in ("node", "system")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("tensor", "NAME=VALUE"),
        ("tensr=1", "did you mean 'tensor'"),
        ("tensor=two", "whole number"),
        ("tensor=0", "whole number"),
        ("params=nod", "did you mean 'node'"),
        ("schedule=1f1", "did you mean '1f1b'"),
        ("recompute<=none", "no order"),
        ("recompute=all", "not a value"),
    ],
)
def test_a_bad_pin_is_one_clear_error(text: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        parse_pins([text], CLUSTERS["dgx 4x2"] if "nod" not in text else CLUSTERS["frontier 2x2x2"], schedule_names())


def test_pins_that_exclude_each_other_are_refused() -> None:
    cluster = CLUSTERS["dgx 4x2"]
    for texts in (["tensor=1", "tensor>=2"], ["schedule=1f1b", "schedule=gpipe"]):
        with pytest.raises(PlanError, match="exclude each other"):
            parse_pins(texts, cluster, schedule_names())
    assert parse_pins(["tensor>=2", "tensor<=4"], cluster, ()).ranges["tensor"] == (2, 4)


def test_axes_are_read_and_all_of_them_run() -> None:
    assert parse_axes("all") == AXES
    assert parse_axes("pipeline") == ("data", "pipeline")
    with pytest.raises(PlanError, match="did you mean 'tensor'"):
        parse_axes("tenser")
    task = small_task(CLUSTERS["dgx 4x2"])
    for axis in AXES:
        row = tuple(4 if name == axis else 1 for name in AXES)
        candidate = Candidate(0, 1, SERIAL, 1, 1, Placement(-1, -1, -1), mesh_of(row, (2, 1, 1, 1)))
        assert refusal(task.cluster, plan_of(task, candidate), task.blocks) == ""


@given(layers=st.integers(1, 40), virtual=st.integers(1, 42), head=st.floats(0, 6), ends=st.integers(0, 2))
def test_layers_are_shared_as_well_as_they_can_be(layers: int, virtual: int, head: float, ends: int) -> None:
    if virtual > layers + ends:
        with pytest.raises(PlanError, match="virtual stages"):
            share_layers(layers, virtual, head, ends)
        return
    counts = share_layers(layers, virtual, head, ends)
    assert sum(counts) == layers
    # The last stage may have the head alone, the first the embedding where there are more stages than else have blocks.
    assert min(counts[1:-1], default=1) >= 1
    assert counts[0] >= (virtual != layers + 2)
    assert counts[-1] >= (ends == 0)
    if virtual > 1:
        slowest = max(*counts[:-1], counts[-1] + head)
        fewest = 0 if ends else 1
        others = [
            max(-(-(layers - last) // (virtual - 1)), last + head)
            for last in range(fewest, max(fewest, layers - (virtual - 1)) + 1)
        ]
        assert slowest == pytest.approx(min(others))


def test_experts_are_cut_by_no_tensor_columns() -> None:
    """Layers of two kinds are shared among stages and tensor rows, and the best plan is one that runs."""
    task = Task(model=mixture(dense_layers=(0,)), cluster=CLUSTERS["dgx 4x2"], batch=8, sequence=64)
    found = list(meshes(Space(task=task, pins=parse_pins(["columns<=2"], task.cluster, []))))
    assert {mesh.total("columns") for mesh in found} == {1}
    assert {mesh.total("rows") for mesh in found} == {1, 2}
    assert {mesh.total("pipeline") for mesh in found} == {1, 2, 4}
    best = find(Space(task=task), count=1)[0].best[0]
    validate(task.cluster, plan_of(task, best.candidate), task.blocks)
    pins = parse_pins(["columns=2"], task.cluster, schedule_names())
    assert not list(meshes(Space(task=task, pins=pins)))
    # Formats of rows are of plans that spread experts, and exclude no others.
    rounded = replace(task, wire={"dispatch": {"node": "fp8"}, "combine": {"node": "fp8"}})
    again = find(Space(task=rounded), count=1)[0].best[0]
    whole = parse_pins(["expert=1", "expert_rows=1"], task.cluster, schedule_names())
    assert again.step_s <= find(Space(task=task, pins=whole), count=1)[0].best[0].step_s * (1 + TIE)
    validate(task.cluster, plan_of(rounded, again.candidate), task.blocks)


@pytest.mark.parametrize(("batch", "sequence"), [(0, 256), (8, 0)])
def test_an_impossible_task_is_refused(batch: int, sequence: int) -> None:
    with pytest.raises(PlanError, match="at least one"):
        Task(model=SMALL, cluster=CLUSTERS["dgx 4x2"], batch=batch, sequence=sequence)


def test_a_task_beyond_the_positions_or_the_dtypes_is_refused() -> None:
    with pytest.raises(ModelError, match="positions"):
        Task(model=SMALL, cluster=CLUSTERS["dgx 4x2"], batch=8, sequence=1024)
    device = replace(load_cluster("dgx-a100").device, peak_flops_per_s={"fp32": 1e12})
    with pytest.raises(PlanError, match="no peak"):
        Task(model=SMALL, cluster=replace(CLUSTERS["dgx 4x2"], device=device), batch=8, sequence=256)


def test_schedules_are_known_by_what_they_do() -> None:
    known = traits()
    assert known["1f1b"].chunks == (1,)
    assert not known["1f1b"].split
    assert 1 not in known["interleaved"].chunks
    assert known["zb-h1"].split
    assert known["interleaved"].looped
    assert set(known) <= set(schedule_names())
