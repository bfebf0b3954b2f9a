"""The planner: what it says of plans, presets, curves and figures."""

import gc
import math
from dataclasses import replace
from itertools import pairwise

import pytest

from terrace.base.errors import PlanError
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.presets import PRESETS, preset
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import Evaluator, step_of
from terrace.planner.explain import placement_of, preset_changes, reasons
from terrace.planner.figures import hfu, mfu
from terrace.planner.pins import Pins
from terrace.planner.ranking import TIE, Estimate, ranked, window
from terrace.planner.scaling import curve, evaluate_plan, sizes_up_to
from terrace.planner.search import Search, find
from terrace.planner.space import Space
from terrace.planner.stages import MOST_PASSES, SERIAL, pipeline
from terrace.planner.task import Candidate, Placement, Task
from terrace.simulate.layers import seconds_of
from terrace.simulate.step import predict_step
from tests.support.planner_cases import (
    CLUSTERS,
    evaluator_of,
    gpt,
    mesh_of,
    sized,
    small_task,
)


def test_what_is_kept_of_a_micro_batch_grows_in_a_straight_line() -> None:
    estimator = Estimator(small_task(CLUSTERS["frontier 2x2x2"]))
    mesh = mesh_of((1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1))
    for kind in range(3):
        for again in (0, 1):
            fresh = Estimator(estimator.task).kept_bytes(kind, mesh, 1, again)
            assert estimator.kept_bytes(kind, mesh, 6, again) == 6 * fresh
    whole = estimator.numels.all(Mesh.build(3))
    task = estimator.task
    for kind in (0, 2):  # they see tokens alone, so half of a sequence twice is one sequence
        works = (estimator.work(mesh_of((1, 2, context, 1), (2, 1, 1, 1), (2, 1, 1, 1)), context) for context in (1, 2))
        one, two = (seconds_of(task.cluster.device, work, estimator.specs[kind]) for work in works)
        assert one == two
    assert whole[0] + 4 * whole[1] + whole[2] == sum(b.num_trainable for b in estimator.task.blocks)


def test_utilisation_follows_its_formula() -> None:
    task = small_task(CLUSTERS["dgx 4x2"])
    candidate = Candidate(1, 1, SERIAL, 1, 1, Placement(-1, -1, -1), mesh_of((4, 1, 1, 1), (2, 1, 1, 1)))
    estimate = evaluator_of(task).played(candidate)
    hidden, layers, vocab, tokens = 512, 4, 1000, 8 * 256
    # Narayanan et al. 2104.04473, equation 3, and Korthikanti et al. 2205.05198, section 6.
    attention = 256 / (6 * hidden)
    model_flops = 72 * tokens * layers * hidden**2 * (1 + attention + vocab / (12 * layers * hidden))
    hardware = 96 * tokens * layers * hidden**2 * (1 + attention + vocab / (16 * layers * hidden))
    possible = estimate.step_s * 8 * 312e12
    assert mfu(task, estimate, full=True) == pytest.approx(model_flops / possible)
    # Of a causal row of 256 keys, 128.5 are seen in the mean.
    half = attention * 128.5 / 256 - attention
    assert mfu(task, estimate) == pytest.approx((model_flops + 72 * tokens * layers * hidden**2 * half) / possible)
    assert hfu(task, estimate, full=True) == pytest.approx(hardware / possible)
    assert hfu(task, estimate) == pytest.approx((hardware + 96 * tokens * layers * hidden**2 * half) / possible)


def test_every_preset_is_priced_or_refused() -> None:
    model = gpt(24, 2304, 24)
    task = Task(model=model, cluster=sized("frontier", 2, 4, 2, memory_bytes=24e9), batch=64, sequence=2048)
    found = {change.words: change for change in preset_changes(task, Pins())}
    assert list(found) == list(PRESETS)
    ddp, zero3 = found["ddp"], found["zero3"]
    assert "too much" in ddp.reason
    assert ddp.cost is not None
    assert ddp.cost.needed_bytes > 24e9
    assert not zero3.reason
    assert zero3.cost is not None
    assert "int4" in found["zero++"].note
    uneven = replace(task, batch=65)
    assert all("not a multiple" in change.reason for change in preset_changes(uneven, Pins()))


def test_reasons_are_one_step_away() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, evaluator = find(space, count=1)
    near = reasons(space, evaluator, found.best[0].candidate)
    assert {"params", "grads", "micro_batch", "recompute"} <= {change.words.split(" = ")[0] for change in near}
    for change in near:
        if isinstance(change.cost, Estimate) and not change.reason:
            assert ranked([change.cost, found.best[0]])[0] == found.best[0]


def test_a_batch_in_tokens_and_an_endless_pipeline_are_refused() -> None:
    task = small_task(CLUSTERS["dgx 4x2"])
    with pytest.raises(PlanError, match="give fewer, for 4,000,000 tokens a step 15,625"):
        replace(task, batch=4_000_000)
    assert replace(task, batch=100_000).batch == 100_000
    with pytest.raises(PlanError, match="use larger micro-batches"):
        pipeline("1f1b", 4, 1, MOST_PASSES // 4 + 1)
    # What is refused is not in the space.
    large = replace(task, batch=100_000, cluster=sized("dgx-a100", 4, 1))
    space = Space(task=large, axes=("data", "pipeline"), pins=Pins({"pipeline": (4, 4)}, "1f1b"))
    found, _ = find(space, count=1)
    assert found.is_complete
    assert found.best[0].num_micros * 4 <= MOST_PASSES


def test_what_fits_nowhere_names_the_nearest() -> None:
    model = gpt(24, 2304, 24)
    task = Task(model=model, cluster=sized("frontier", 2, 4, 1, memory_bytes=4e9), batch=64, sequence=2048)
    found, _ = find(Space(task=task, axes=("data",)))
    assert not found.best
    assert found.nearest is not None
    assert task.recomputed(found.nearest.candidate.recompute) == ("layers.*",)
    assert found.nearest.candidate.placement == Placement(1, 1, 1)
    assert found.nearest.candidate.micro_batch == 1


def test_the_nearest_is_no_plan_that_a_schedule_refuses() -> None:
    """Interleaved schedules take groups of as many micro-batches as there are stages, and 3 does not divide 8."""
    cluster = sized("dgx-a100", 8, 3, memory_bytes=1.9e9)
    task = Task(model=replace(gpt(24, 1024, 16), vocab_size=50257), cluster=cluster, batch=8, sequence=512)
    found, _ = find(Space(task=task, pins=Pins({"pipeline": (3, 3), "tensor": (8, 8)})), count=1)
    assert not found.best
    assert found.nearest is not None
    assert found.nearest.needed_bytes > task.cluster.device.usable_bytes


def test_the_stage_with_most_layers_bounds_a_step() -> None:
    """Of four stages one has two layers, whether there are 5 or 8."""
    few, many = (
        Search(space, Evaluator(space.task), math.inf).least_s()
        for space in (
            Space(
                task=Task(model=gpt(layers, 512, 8), cluster=sized("dgx-a100", 4, 1), batch=64, sequence=256),
                pins=Pins({"pipeline": (4, 4), "micro_batch": (1, 1)}, "1f1b"),
            )
            for layers in (5, 8)
        )
    )
    assert 0.85 * many < few <= many


def test_curves_keep_the_batch_or_the_share() -> None:
    cluster = sized("frontier", 2, 4, 16)
    task = Task(model=gpt(24, 2304, 24), cluster=cluster, batch=256, sequence=2048)
    plan = replace(preset("zero3", cluster), compute="bf16")
    sizes = sizes_up_to(16)
    weak, strong = curve(task, plan, sizes, "weak"), curve(task, plan, sizes, "strong")
    assert [point.task.batch for point in weak] == [16, 32, 64, 128, 256]
    assert {point.task.batch for point in strong} == {256}
    ran = [point for point in weak if point.estimate]
    assert len(ran) >= 3
    assert all(later.tokens_per_s > earlier.tokens_per_s for earlier, later in pairwise(ran))
    assert weak[-1].estimate is not None
    assert strong[-1].estimate is not None
    assert weak[-1].estimate.step_s == strong[-1].estimate.step_s
    hours = weak[-1].task.batch * 2048 and 1e6 / weak[-1].tokens_per_s / 3600
    assert weak[-1].cost_per_million(2.0) == pytest.approx(2.0 * hours * 128)
    assert sizes_up_to(6) == [1, 2, 4, 6]


def test_any_plan_that_can_run_has_a_price() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=24)
    plan = replace(preset("zero3", task.cluster), compute="bf16")
    for changed in (replace(plan, prefetch=3), replace(plan, recompute=("head",)), replace(plan, unit=2)):
        assert evaluate_plan(task, changed).step_s == predict_step(step_of(task, changed)).step_s
    with pytest.raises(PlanError, match="not a multiple"):
        evaluate_plan(task, replace(plan, micro_batch=5))
    layout = Layout.of(task.cluster, plan)
    assert placement_of(task, plan) == Placement(layout.params, layout.grads, layout.optimizer)


def test_a_search_leaves_the_garbage_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    space = Space(task=small_task(CLUSTERS["dgx 4x2"]), axes=("data",))
    find(space, count=1)
    assert gc.isenabled()
    gc.disable()
    try:
        find(space, count=1)
        assert not gc.isenabled()
    finally:
        gc.enable()
    monkeypatch.setattr(Search, "run", lambda *_: [][0])
    with pytest.raises(IndexError):
        find(space)
    assert gc.isenabled()


def test_what_is_as_good_as_equally_fast_is_ranked_by_simplicity() -> None:
    """A difference below a thousandth decides nothing; groups begin at their fastest, so they do not run on."""
    simple = evaluator_of(small_task(CLUSTERS["dgx 4x2"])).played(
        Candidate(0, 1, SERIAL, 1, 1, Placement(-1, -1, -1), mesh_of((4, 1, 1, 1), (2, 1, 1, 1)))
    )

    def plan(step_s: float, recompute: int = 0, more_bytes: int = 0, tensor: int = 1) -> Estimate:
        candidate = simple.candidate._replace(
            recompute=recompute, mesh=mesh_of((4 // tensor, tensor, 1, 1), (2, 1, 1, 1))
        )
        memory = dict(simple.memory_bytes) | {"context": simple.memory_bytes["context"] + more_bytes}
        return replace(simple, candidate=candidate, step_s=step_s, memory_bytes=memory)

    fastest, again, larger, split = plan(1, 1), plan(1 + 0.9 * TIE, 1, 5), plan(1 + 0.5 * TIE, 0, 9), plan(1, 0, 9, 2)
    next_best, last = plan(1 + 1.1 * TIE), plan(1 + 2.2 * TIE)
    order = [larger, split, fastest, again, next_best, last]
    assert ranked(order) == ranked(order[::-1]) == order
    by_time = sorted(order, key=lambda each: each.step_s)
    assert window(by_time, 7).end_s == math.inf
    assert window(by_time, 4).end_s == pytest.approx(1 + TIE)
    assert window(by_time, 2).worst == (0, larger.needed_bytes)
    assert window(by_time, 5).leader_s == next_best.step_s


def test_seconds_sum_to_the_step() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=16)
    serial, pipelined = mesh_of((4, 1, 1, 1), (2, 1, 1, 1)), mesh_of((2, 1, 1, 2), (1, 1, 1, 2))
    for schedule, mesh in ((SERIAL, serial), ("zb-h1", pipelined)):
        estimate = evaluator_of(task).played(Candidate(0, 1, schedule, 1, 1, Placement(1, 1, 1), mesh))
        assert estimate.step_s == pytest.approx(math.fsum(estimate.time_s.values()))
        assert mesh.total("pipeline") == 1 or estimate.time_s["wait pipeline"] > 0
