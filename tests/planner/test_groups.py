"""Groups of shapes: together they are the space, and a bound of a group holds for everything in it."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.plan.mesh import Mesh
from terrace.planner.candidate import SLACK
from terrace.planner.evaluate import Evaluator
from terrace.planner.least_recomputation import recomputations
from terrace.planner.pins import Pins
from terrace.planner.schedule_pins import schedules
from terrace.planner.search import in_units, units_of
from terrace.planner.space import (
    Group,
    OpenMesh,
    Space,
    closed,
    divided_groups,
    groups,
    micro_batches,
    open_meshes,
    placements,
)
from tests.support.planner_cases import CLUSTERS, MIXED, SMALL, adapted, evaluator_of, gpt, sized, small_task

# Ulysses ranks cannot have 6 heads in fours, nor 2 key-value heads in threes; the logits of the last cost many layers.
SIX_HEADS = gpt(6, 384, 6, vocab=1000, positions=512)
MODELS = {
    "small": SMALL,
    "grouped": replace(SMALL, num_kv_heads=2),
    "six heads": SIX_HEADS,
    "six grouped": replace(SIX_HEADS, num_kv_heads=2),
    "large vocabulary": gpt(5, 128, 4, vocab=40_000, positions=512),
    "mixed": MIXED,
}
TASKS = {
    f"{model}, {cluster}, {batch}": small_task(CLUSTERS.get(cluster, wide), batch, MODELS[model])
    for wide in [sized("dgx-a100", 4, 3)]
    for model, cluster, batch in [
        ("small", "frontier 2x2x2", 24),
        ("small", "lab 2x2x2", 8),
        ("grouped", "dgx 4x2", 16),
        ("six heads", "dgx 4x3", 24),
        ("six grouped", "dgx 4x3", 12),
        ("large vocabulary", "dgx 4x2", 8),
        ("large vocabulary", "ethernet 2x2", 4),
        ("mixed", "dgx 4x2", 8),
        ("mixed", "ethernet 2x2", 4),
    ]
}
for _name in ("grouped, dgx 4x2, 16", "mixed, ethernet 2x2, 4"):
    TASKS[f"{_name}, adapted"] = adapted(TASKS[_name])


def groups_of(space: Space, evaluator: Evaluator) -> list[Group]:
    found = groups(space, by_tokens=evaluator.estimator.computes_by_tokens)
    return [group._replace(recompute=again) for group in found for again in recomputations(space, group.shape.mesh)]


@pytest.mark.parametrize("pins", [Pins(), Pins({"micro_batch": (1, 3), "ulysses": (2, 2)}), Pins({"columns": (1, 2)})])
@pytest.mark.parametrize("by_tokens", [True, False])
def test_groups_are_the_whole_space_once(pins: Pins, by_tokens: bool) -> None:
    """Also where attention writes its scores: the tiles of those products depend on the form, not on tokens alone."""
    task = TASKS["grouped, dgx 4x2, 16"]
    space = Space(task=task, pins=pins)
    estimator = evaluator_of(task).estimator
    assert estimator.computes_by_tokens
    found = list(groups(space, by_tokens=by_tokens))
    members = [member for group in found for member in group.members]
    every = [(shape, each) for shape in open_meshes(space) for each in micro_batches(space, shape.mesh.total("data"))]
    assert len(members) == len(set(members)) == len(every)
    assert set(members) == set(every)
    assert (len(found) < len(every)) == by_tokens
    for group in found:
        own = estimator.work(group.shape.mesh, group.micro_batch).tokens
        for shape, micro_batch in group.members:
            assert task.batch == shape.mesh.total("data") * micro_batch * group.num_micros
            assert shape.mesh.only("tensor", "pipeline") == group.shape.mesh.only("tensor", "pipeline")
            for mesh in closed(space, shape):
                assert estimator.work(mesh, micro_batch).tokens == own


@pytest.mark.parametrize("name", TASKS)
def test_a_group_computes_no_longer_than_any_form_of_its_members(name: str) -> None:
    """Forward and backward of every kind of block, without messages of context ranks, on all forms."""
    task = TASKS[name]
    space, evaluator = Space(task=task), evaluator_of(task)
    works, rings = evaluator.bounds.works, set[int]()
    for group in groups_of(space, evaluator):
        accumulate = group.num_micros > 1
        own = works.of(group.shape, group.micro_batch, group.recompute, accumulate, context=False)
        rings.add(group.shape.mesh.total("ring"))
        for shape, micro_batch in group.members:
            for mesh in closed(space, shape):
                form = works.of(OpenMesh(mesh), micro_batch, group.recompute, accumulate)
                for least, work in zip(own.each, form.each, strict=True):
                    assert least[0] <= work[0] * (1 + 1e-12)
                    assert least[1] <= work[1] * (1 + 1e-12)
                    assert least[1] - least[2] <= (work[1] - work[2]) * (1 + 1e-12)
                assert own.whole_s <= form.whole_s * (1 + 1e-12)
    # Heads that do not divide leave a ring.
    assert max(rings) > 1 or "six heads" not in name


def _divided_as(space: Space, group: Group, mesh: Mesh) -> Group:
    if not group.shape.divides:
        return group
    return next(each for each in divided_groups(space, group) if each.shape.mesh.apart == mesh.apart)


@pytest.mark.parametrize("name", [name for name in TASKS if name.startswith("mixed")])
def test_a_group_is_bounded_by_the_least_of_its_divisions(name: str) -> None:
    """With and without playing the chunks in which tokens go to experts, and before any division."""
    task = TASKS[name]
    space, evaluator = Space(task=task), evaluator_of(task)
    bounds, works = evaluator.bounds, evaluator.bounds.works
    waits = 0
    for group in groups_of(space, evaluator):
        shapes = {OpenMesh(mesh) for shape, _ in group.members for mesh in closed(space, shape)}
        divided = divided_groups(space, group)
        assert {each.shape.mesh.apart for each in divided} == {shape.mesh.apart for shape in shapes}
        numbers = group.micro_batch, group.recompute, group.num_micros > 1
        least = works.of(group.shape, *numbers, context=False, exact=False)
        schedule = schedules(space, group.shape.mesh.total("pipeline"))
        spans = bounds.group_spans(group, schedule)
        choices = tuple((each, 1) for each in placements(space, group.member.mesh))
        spans_s = bounds.group_scheduled_s(group, spans, choices)
        for each in divided:
            early, late = (works.of(each.shape, *numbers, context=False, exact=exact) for exact in (False, True))
            for pair in ((least, early), (early, late)):
                for low, high in zip(*(found.each for found in pair), strict=True):
                    assert low[0] <= high[0] * (1 + 1e-12)
                    assert low[1] <= high[1] * (1 + 1e-12)
                    assert low[1] - low[2] <= (high[1] - high[2]) * (1 + 1e-12)
            # A bound that says little would be of no use.
            assert early.whole_s >= 0.5 * late.whole_s
            waits += early.whole_s > 1.01 * least.whole_s
            assert bounds.group_s(group) <= bounds.group_s(each) * (1 + 1e-12)
            own = bounds.group_spans(each, schedule)
            own_s = bounds.group_scheduled_s(each, own, choices)
            for before, before_s, after, after_s in zip(spans, spans_s, own, own_s, strict=True):
                assert before.span_s <= after.span_s * (1 + 1e-12)
                assert before_s <= after_s * (1 + 1e-12)
    assert waits > 0


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_bounds_of_groups_never_exceed_the_evaluation(data: st.DataObject) -> None:
    task = TASKS[data.draw(st.sampled_from(sorted(TASKS)))]
    space, evaluator = Space(task=task), evaluator_of(task)
    bounds = evaluator.bounds
    group = data.draw(st.sampled_from(groups_of(space, evaluator)))
    shape, micro_batch = data.draw(st.sampled_from(group.members))
    mesh = data.draw(st.sampled_from(closed(space, shape)))
    names = schedules(space, mesh.total("pipeline"))
    spans = bounds.group_spans(group, names)
    # A schedule without a span has more virtual stages than layers.
    root = bounds.root(OpenMesh(mesh), micro_batch, group.recompute)
    cores = [core for name in names if (core := bounds.core(root, *name)) is not None]
    assert [(core.schedule, core.chunks) for core in cores] == [(span.schedule, span.chunks) for span in spans]
    if not spans:
        return
    number = data.draw(st.integers(0, len(spans) - 1))
    (core,) = in_units(space, cores[number])
    placement = data.draw(st.sampled_from(placements(space, mesh)))
    unit = data.draw(st.sampled_from(units_of(space, core, placement)))
    try:
        step_s = evaluator.evaluate(core.candidate(placement, unit)).step_s
    except PlanError:
        return
    group_s = bounds.group_s(group)
    assert group_s <= min(each.span_s for each in spans) * (1 + 1e-9)
    for each, exact in [(group, False), *((_divided_as(space, group, mesh), exact) for exact in (False, True))]:
        span = bounds.group_spans(each, names, exact=exact)[number]
        assert max(bounds.group_s(each), span.span_s * SLACK) <= step_s
        (scheduled_s,) = bounds.group_scheduled_s(each, [span], ((placement, unit),), exact=exact)
        assert scheduled_s * SLACK <= step_s
        along_s = bounds.group_along_s(each, [span], ((placement, unit),), exact=exact)
        assert scheduled_s <= along_s * (1 + 1e-12)
        assert along_s * SLACK <= step_s
    # The same of the open shape, with the messages of its cheapest form.
    open_root = bounds.root(shape, micro_batch, group.recompute)
    open_span = bounds.spans(open_root, names)[number]
    (open_s,) = bounds.root_scheduled_s(open_root, [open_span], ((placement, unit),))
    assert open_s * SLACK <= step_s
    assert group_s <= open_root.bound_s * (1 + 1e-9)
