"""The planner: bounds that never exceed the evaluation, a search that equals trying everything, and its figures."""

import gc
import math
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.cluster.presets import load_cluster
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import AXES
from terrace.plan.presets import PRESETS, preset
from terrace.planner.estimate import Estimator
from terrace.planner.evaluate import step_of
from terrace.planner.explain import placement_of, preset_verdicts, reasons
from terrace.planner.figures import hfu, mfu
from terrace.planner.pins import Pins
from terrace.planner.ranking import TIE, Estimate, ranked, window
from terrace.planner.scaling import curve, evaluate_plan, sizes_up_to
from terrace.planner.search import Search, find
from terrace.planner.space import OpenMesh, Space, closed, open_meshes, placements, units
from terrace.planner.stages import MOST_PASSES, SERIAL, pipeline
from terrace.planner.task import Candidate, Placement, Task, num_micros, plan_of
from terrace.program.instruction import Op
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.simulate.layers import seconds_of
from terrace.simulate.step import predict_step
from terrace.simulate.timeline import play
from tests.support.exhaustive import check_search, cores_of, meshes
from tests.support.nightly import nightly
from tests.support.planner_cases import (
    CLUSTERS,
    MIXED,
    SMALL,
    evaluator_of,
    gpt,
    mesh_of,
    sized,
    small_task,
    without_penalties,
)
from tests.support.state_formula import model_state_bytes


@pytest.mark.parametrize(
    ("name", "axes", "batch"),
    [
        *((name, ("data",), 24) for name in CLUSTERS),
        *nightly(*((name, AXES, 4) for name in ("ethernet 2x2", "frontier 2x1x2")), ("dgx 2x3", AXES, 6)),
        *nightly(("frontier 2x2x2", ("data", "pipeline"), 4)),
    ],
)
def test_the_search_equals_trying_everything(name: str, axes: tuple[str, ...], batch: int) -> None:
    """The same candidates in the same order, also where memory rules some out; test_operations.py has all axes."""
    check_search(small_task(CLUSTERS[name], batch=batch), axes)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_bounds_never_exceed_the_evaluation(data: st.DataObject) -> None:
    cluster = CLUSTERS[data.draw(st.sampled_from(sorted(CLUSTERS)))]
    task = small_task(cluster, batch=24, model=data.draw(st.sampled_from((SMALL, MIXED))))
    if task.model is SMALL:
        task = replace(task, operations=data.draw(st.sampled_from([(), ("mlp",)])))
    space, evaluator = Space(task=task), evaluator_of(task)
    shape = OpenMesh(mesh := data.draw(st.sampled_from(list(meshes(space)))))
    core = data.draw(st.sampled_from(list(cores_of(space, evaluator.bounds, shape))))
    root = evaluator.bounds.root(shape, core.micro_batch, core.recompute)
    # Where its context ranks have no form yet, what is said of all forms holds for this one.
    unformed = next((each for each in open_meshes(space) if mesh in closed(space, each)), shape)
    open_root = evaluator.bounds.root(unformed, core.micro_batch, core.recompute)
    open_core = evaluator.bounds.core(open_root, core.schedule, core.chunks)
    assert open_core is not None
    open_core = open_core.passing(core.unit) if core.unit else open_core
    try:
        played = core if core.played else evaluator.bounds.play(core)
    except PlanError:
        return
    placement = data.draw(st.sampled_from(placements(space, mesh)))
    unit = data.draw(st.sampled_from(units(space, core.num_micros, placement, core.schedule != SERIAL)))
    estimate = evaluator.evaluate(played.candidate(placement, unit))
    placed_s = evaluator.bounds.placed_s(played, placement, unit)
    assert root.bound_s <= core.bound_s * (1 + 1e-9)
    assert max(root.bound_s, core.bound_s, played.bound_s, placed_s) <= estimate.step_s
    open_placed_s = evaluator.bounds.placed_s(open_core, placement, unit)
    assert max(open_root.bound_s, open_core.bound_s, open_placed_s) <= estimate.step_s
    # Along the critical path of a pipeline with the same orders.
    for each in (core, open_core):
        assert evaluator.bounds.placed_s(evaluator.bounds.tightened(each), placement, unit) <= estimate.step_s
    for each in (open_root, open_core, root, core, played):
        assert evaluator.bounds.least_bytes(each, placement, unit) <= estimate.needed_bytes
    # A bound that says little would be of no use: computing is most of what these take.
    assert max(played.bound_s, placed_s) >= 0.25 * estimate.step_s


def test_a_task_of_the_search_takes_few_evaluations() -> None:
    """GPT-3 175B on 16,384 devices over every axis: half a second to one on one core."""
    model = gpt(96, 12288, 96)
    task = Task(model=model, cluster=load_cluster("dgx-a100").resized(2048), batch=1536, sequence=2048)
    found, _ = find(Space(task=task))
    # What takes the time, whatever the machine: 454, 16 and 6 were counted.
    assert 14_000 < found.num_roots < 17_000
    assert found.num_opened < 500  # the others are bounded by their group alone
    assert found.num_played <= 24
    assert found.num_evaluated <= 15
    assert found.proved
    assert len(found.best) == 5
    assert found.best[0].candidate.mesh.total("tensor") > 1
    assert found.best[0].candidate.mesh.total("pipeline") > 1


GROUPED = replace(SMALL, num_kv_heads=2)


@pytest.mark.parametrize(
    ("cluster", "numbers", "flash"),
    [
        ("frontier 2x2x2", {}, True),
        ("frontier 2x2x2", {"compute": "fp32", "model": GROUPED}, True),
        # The decoder attends with plain products here; `terrace simulate` says so, and the planner says the same.
        ("frontier 2x2x2", {"compute": "fp64", "master": "fp64"}, False),
        ("lab 2x2x2", {"compute": "bf16", "sequence": 128}, False),
        ("lab 2x2x2", {"compute": "bf16", "sequence": 129}, True),
    ],
)
def test_a_plan_of_the_data_axis_is_priced_as_its_program_is_simulated(cluster: str, numbers: Any, flash: bool) -> None:
    """The evaluation of a whole step of few micro-batches is the simulation of its program, bytes included."""
    task = replace(small_task(CLUSTERS[cluster], batch=48), **numbers)
    evaluator = evaluator_of(task)
    for unit, micro_batch in ((1, 3), (1, 2), (2, 1), (3, 1), (1, 1)):
        mesh = mesh_of(*((tier.size, 1, 1, 1) for tier in task.cluster.tiers))
        candidate = Candidate(1, unit, SERIAL, 1, micro_batch, Placement(0, 1, 2), mesh)
        estimate = evaluator.evaluate(candidate)
        program, costs = evaluator.program(evaluator.estimator.split.whole(), candidate, num_micros(task, candidate))
        plan = plan_of(task, candidate)
        work = work_of(task.cluster, plan, task.layer, task.sequence)  # what `terrace simulate` prices
        assert work.flash == flash
        real = build(task.cluster, plan, task.blocks, num_micros(task, candidate))
        whole = simulate(real, step_costs(real, work))
        assert simulate(program, costs).time_s == pytest.approx(whole.time_s)
        assert estimate.step_s == pytest.approx(whole.step_s, rel=2e-3)
        bytes_of_whole = {(message.value, tier): count for (message, tier), count in whole.sent_bytes.items()}
        assert evaluator.played(candidate).sent_bytes == bytes_of_whole
        states = model_state_bytes(task.cluster, plan, task.blocks, num_micros(task, candidate))
        for name in ("params", "grads", "optimizer", "secondary", "buffers"):
            assert estimate.memory_bytes.get(name, 0) == states.get(name, 0)


@pytest.mark.parametrize(
    "mesh",
    [
        mesh_of((1, 2, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1)),
        mesh_of((1, 2, 1, 1), (1, 2, 1, 1), (2, 1, 1, 1)),
        mesh_of((1, 2, 1, 1, 2), (2, 1, 1, 1), (2, 1, 1, 1)),
        mesh_of((1, 2, 1, 1, 2), (1, 2, 1, 1), (2, 1, 1, 1)),
    ],
)
@pytest.mark.parametrize("again", [0, 1])
@pytest.mark.parametrize("costs_cores", [True, False])
def test_a_plan_of_the_tensor_axis_is_priced_as_its_program_is_simulated(
    mesh: Mesh, again: int, costs_cores: bool
) -> None:
    """The same for rows and columns, no tolerance but the rounding of sums: both play one program."""
    cluster = CLUSTERS["frontier 2x2x2"]
    task = small_task(cluster if costs_cores else without_penalties(cluster), batch=48)
    evaluator = evaluator_of(task)
    for unit, micro_batch, placement in (
        (1, 4, Placement(0, 1, 2)),
        (2, 2, Placement(-1, 1, 2)),
        (1, 6, Placement(2, 2, 2)),
    ):
        candidate = Candidate(again, unit, SERIAL, 1, micro_batch, placement, mesh)
        plan, micros = plan_of(task, candidate), num_micros(task, candidate)
        estimate = evaluator.evaluate(candidate)
        real = build(task.cluster, plan, task.blocks, micros, task.sequence)
        work = work_of(task.cluster, plan, task.layer, task.sequence)
        whole = simulate(real, step_costs(real, work))
        assert simulate(
            *evaluator.program(evaluator.estimator.split.whole(), candidate, micros)
        ).time_s == pytest.approx(whole.time_s)
        assert whole.time_s["wait tensor"] > 0
        assert estimate.step_s == pytest.approx(whole.step_s, rel=2e-3)
        sent = {(message.value, tier): count for (message, tier), count in whole.sent_bytes.items()}
        assert evaluator.played(candidate).sent_bytes == sent
        states = model_state_bytes(task.cluster, plan, real.blocks, micros, task.sequence)
        for name in ("params", "grads", "optimizer", "secondary", "buffers"):
            assert estimate.memory_bytes.get(name, 0) == states.get(name, 0)
        # What the search bounds this by is the same computing and the same messages inside.
        blocks = [evaluator.estimator.block(kind, mesh, micro_batch) for kind in range(3)]
        passes = sum(count * (b.forward_s + b.backward_s) for count, b in zip((1, 4, 1), blocks, strict=True))
        more = 4 * blocks[1].recompute_s if again else 0.0
        own = math.fsum(whole.time_s[name] for name in ("forward", "backward", "wait tensor"))
        if not costs_cores:
            assert micros * (passes + more) == pytest.approx(own)
            continue
        # Messages of states slow what hides them, which a bound does not count.
        costs = step_costs(real, work)
        sends = [each for each in real.instructions if each.op in (Op.GATHER, Op.REDUCE, Op.SYNC, Op.REFRESH)]
        assert 0 < own - micros * (passes + more) < cluster.device.overlap_penalty * sum(map(costs.collective_s, sends))


def test_a_pipeline_is_near_its_orders_played_with_all_waiting() -> None:
    """Stretching the played span stands for playing every task with the waits of its stage."""
    task = small_task(CLUSTERS["dgx 4x2"], batch=16, model=gpt(8, 512, 4, vocab=1000))
    evaluator = evaluator_of(task)
    for placement in (Placement(-1, -1, -1), Placement(1, 1, 1)):
        candidate = Candidate(0, 1, "1f1b", 1, 1, placement, mesh_of((2, 1, 1, 2), (1, 1, 1, 2)))
        estimate = evaluator.evaluate(candidate)
        pipeline, stages = evaluator.stages(candidate)
        stretch = [stage.unit_s / own_s for stage, own_s in zip(stages, pipeline.stages_s, strict=True)]
        span_s = play(pipeline.orders, pipeline.seconds(stretch)).makespan_s
        tail_s = max(sum(stage.report(4).values()) - 4 * stage.unit_s for stage in stages)
        assert span_s + tail_s == pytest.approx(estimate.step_s, rel=0.1)


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
    estimate = evaluator_of(task).evaluate(candidate)
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


def test_every_preset_gets_a_verdict() -> None:
    model = gpt(24, 2304, 24)
    task = Task(model=model, cluster=sized("frontier", 2, 4, 2, memory_bytes=24e9), batch=64, sequence=2048)
    verdicts = {verdict.what: verdict for verdict in preset_verdicts(task, Pins())}
    assert list(verdicts) == list(PRESETS)
    ddp, zero3 = verdicts["ddp"], verdicts["zero3"]
    assert "too much" in ddp.reason
    assert ddp.estimate is not None
    assert ddp.estimate.needed_bytes > 24e9
    assert not zero3.reason
    assert zero3.estimate is not None
    assert "int4" in verdicts["zero++"].note
    uneven = replace(task, batch=65)
    assert all("not a multiple" in verdict.reason for verdict in preset_verdicts(uneven, Pins()))


def test_reasons_are_one_step_away() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"], batch=32)
    space = Space(task=task, axes=("data",))
    found, evaluator = find(space, count=1)
    near = reasons(space, evaluator, found.best[0].candidate)
    assert {"params", "grads", "micro_batch", "recompute"} <= {verdict.what.split(" = ")[0] for verdict in near}
    for verdict in near:
        if verdict.estimate is not None and not verdict.reason:
            assert ranked([verdict.estimate, found.best[0]])[0] == found.best[0]


def test_a_batch_in_tokens_and_an_endless_pipeline_are_refused() -> None:
    task = small_task(CLUSTERS["dgx 4x2"])
    with pytest.raises(PlanError, match="give fewer, for 4,000,000 tokens a step 15,625"):
        replace(task, batch=4_000_000)
    assert replace(task, batch=100_000).batch == 100_000
    with pytest.raises(PlanError, match="use larger micro-batches"):
        pipeline("1f1b", 4, 1, MOST_PASSES // 4 + 1)
    # What is refused is not in the space: the search proves its answer without it.
    large = replace(task, batch=100_000, cluster=sized("dgx-a100", 4, 1))
    space = Space(task=large, axes=("data", "pipeline"), pins=Pins({"pipeline": (4, 4)}, "1f1b"))
    found, _ = find(space, count=1)
    assert found.proved
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


def test_a_search_that_stops_early_says_so() -> None:
    task = small_task(CLUSTERS["frontier 2x2x2"])
    found, _ = find(Space(task=task), count=5, limit=2)
    assert found.num_evaluated == 2
    assert not found.proved or len(found.best) < 2
    assert found.least_s < math.inf


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
    simple = evaluator_of(small_task(CLUSTERS["dgx 4x2"])).evaluate(
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


def _total(estimate: Estimate) -> float:
    return math.fsum(estimate.time_s.values())


def test_seconds_sum_to_the_step() -> None:
    task = small_task(CLUSTERS["dgx 4x2"], batch=16)
    serial, pipelined = mesh_of((4, 1, 1, 1), (2, 1, 1, 1)), mesh_of((2, 1, 1, 2), (1, 1, 1, 2))
    for schedule, mesh in ((SERIAL, serial), ("zb-h1", pipelined)):
        estimate = evaluator_of(task).evaluate(Candidate(0, 1, schedule, 1, 1, Placement(1, 1, 1), mesh))
        assert estimate.step_s == pytest.approx(_total(estimate))
        assert mesh.total("pipeline") == 1 or estimate.time_s["wait pipeline"] > 0
