"""Recordings: the fast play against the plain rules, spans, the critical path, memory over the step, changes."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.presets import PRESETS, preset
from terrace.plan.residency import recomputed
from terrace.plan.validate import validate
from terrace.planner.advice import best_change, changes
from terrace.program.instruction import COLLECTIVES, Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.program.recording import COMPUTE, Span
from terrace.simulate import rows
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.critical import by_place, critical_path, critical_words, exposed_by_tier
from terrace.simulate.curve import memory_curve
from terrace.simulate.events import simulate
from terrace.simulate.held_activations import Held
from terrace.simulate.recording import record
from terrace.simulate.step import Step
from tests.support.byte_formula import step_bytes
from tests.support.nightly import in_turns
from tests.support.slow_simulator import slow_time_s
from tests.support.state_formula import model_state_bytes
from tests.support.strategies import Setting, settings_of_a_step
from tests.support.totals import verify

LOCAL = load_cluster("local")
BLOCKS = tuple(BlockSpec(name=f"b{i}", params=(ParamSpec(name="w", shape=(64, 64 + i)),)) for i in range(5))
FLOPS = [2.0 * 64 * 64 * 256] * len(BLOCKS)


def cluster_with(sizes: tuple[int, ...], bandwidth: float = 1e8) -> Cluster:
    tiers = tuple(
        Tier(name=f"t{i}", size=size, bandwidth_bytes_per_s=bandwidth / 3**i, latency_s=1e-5 * (i + 1))
        for i, size in enumerate(sizes)
    )
    return Cluster(name="test", device=replace(LOCAL.device, overlap_penalty=0.0), tiers=tiers)


def price(program: Program) -> Costs:
    return step_costs(program, FLOPS)


def step_of(
    cluster: Cluster,
    plan: Plan,
    num_micros: int,
    blocks: tuple[BlockSpec, ...] = BLOCKS,
    work: tuple[float, ...] = tuple(FLOPS),
) -> Step:
    return Step(cluster=cluster, plan=plan, blocks=blocks, num_micros=num_micros, sequence=0, work=work)


@st.composite
def priced(draw: st.DrawFn) -> tuple[Program, Costs]:
    """Any program, with costs drawn apart from it, zeros among them, so that ties and empty work come up."""
    setting: Setting = draw(settings_of_a_step())
    penalty = draw(st.sampled_from([0.0, 0.3, 1.0]))
    backend: Literal["cpu", "cuda"] = "cpu" if draw(st.booleans()) else "cuda"
    device = replace(setting.cluster.device, overlap_penalty=penalty, backend=backend)
    scale = draw(st.sampled_from([1e3, 1e6, 1e9]))
    tiers = tuple(
        replace(tier, bandwidth_bytes_per_s=scale / 2**i, overlap_penalty=draw(st.sampled_from([None, 0.0, 0.6, 1.0])))
        for i, tier in enumerate(setting.cluster.tiers)
    )
    cluster = replace(setting.cluster, device=device, tiers=tiers)
    program = build(cluster, setting.plan, setting.blocks, setting.num_micros)
    seconds = st.sampled_from([0.0, 1e-5, 1e-3])
    count = len(program.blocks)
    forward_s, backward_s, update_s = (draw(st.lists(seconds, min_size=count, max_size=count)) for _ in range(3))
    costs = Costs(forward_s=tuple(forward_s), backward_s=tuple(backward_s), update_s=tuple(update_s), program=program)
    return program, costs


@settings(max_examples=100, deadline=None)
@given(priced())
def test_the_fast_play_keeps_the_plain_rules(case: tuple[Program, Costs]) -> None:
    program, costs = case
    predicted = simulate(program, costs)
    # Waits are added up in another order, and the clocks of the two, of up to a second, begin apart.
    assert predicted.time_s == pytest.approx(slow_time_s(program, costs), rel=1e-12, abs=1e-15)
    assert predicted.sent_bytes == step_bytes(program.cluster, program.plan, program.blocks, program.num_micros)
    assert record(program, costs).report == predicted


@settings(max_examples=60, deadline=None)
@given(priced())
def test_spans_cover_the_stream_and_never_share_a_lane(case: tuple[Program, Costs]) -> None:
    program, costs = case
    recording = record(program, costs)
    step_s = recording.report.step_s
    lanes = defaultdict(list)
    for span in recording.spans:
        lanes[span.lane].append(span)
    for spans in lanes.values():
        for before, after in pairwise(spans):
            assert after.start_s >= before.end_s - 1e-12
    by_category: dict[str, float] = defaultdict(float)
    clock = 0.0
    for span in recording.spans[recording.first :]:
        if span.lane == COMPUTE:
            assert span.start_s == pytest.approx(clock, abs=1e-12)
            clock = span.end_s
            by_category[span.category] += span.end_s - span.start_s
    assert clock == pytest.approx(step_s)
    assert by_category == pytest.approx(recording.report.time_s)
    assert sum(by_category[name] for name in ("forward", "backward", "update")) == pytest.approx(
        _alone_s(program, costs) + recording.slowed_s
    )
    sent = [span.position for span in recording.spans[recording.first :] if span.lane != COMPUTE]
    assert sorted(sent) == [
        position
        for position, instruction in enumerate(program.instructions)
        if instruction.op in COLLECTIVES and costs.collective_s(instruction) > 0 and not _in_place(program, instruction)
    ]


def _alone_s(program: Program, costs: Costs) -> float:
    """Seconds of compute without any message beside it."""
    again = recomputed(program.plan, program.blocks)
    backward_s = [
        seconds + (costs.forward_s[block] if block in again else 0.0) for block, seconds in enumerate(costs.backward_s)
    ]
    owned = [costs.update_s[block] for block, spec in enumerate(program.blocks) if spec.num_trainable]
    return program.num_micros * (sum(costs.forward_s) + sum(backward_s)) + sum(owned)


def _in_place(program: Program, instruction: Instruction) -> bool:
    return instruction.op is Op.REDUCE and not program.message(instruction).tiers


@settings(max_examples=60, deadline=None)
@given(priced())
def test_the_critical_path_has_no_gap_and_fills_the_step(case: tuple[Program, Costs]) -> None:
    recording = record(*case)
    path = critical_path(recording)
    clock = 0.0
    for piece in path.pieces:
        assert piece.start_s == pytest.approx(clock, abs=1e-12)
        clock = piece.end_s
    assert clock == pytest.approx(recording.report.step_s)
    assert sum(path.seconds.values()) == pytest.approx(recording.report.step_s)
    assert sum(by_place(path.seconds).values()) == pytest.approx(recording.report.step_s)


@settings(max_examples=60, deadline=None)
@given(case=priced())
def test_what_nothing_hides_is_what_the_stream_waits_for(case: tuple[Program, Costs]) -> None:
    recording = record(*case)
    exposed = exposed_by_tier([recording])
    assert sum(exposed.values()) == pytest.approx(critical_path(recording).waits_s, abs=1e-12)
    assert all(spent >= 0 for spent in exposed.values())


def test_a_wait_for_queued_messages_is_shared_by_the_parts_in_flight() -> None:
    cluster = cluster_with((2, 2))
    program = build(cluster, Plan(params="t0", grads="t0", optimizer="t0"), BLOCKS, 1)
    gather, sync = (
        next(n for n, each in enumerate(program.instructions) if each.op is op) for op in (Op.GATHER, Op.SYNC)
    )
    spans = (
        Span(0, 2.0, 6.0, gather, "gather", -1),
        Span(1, 6.0, 10.0, sync, "sync", 0),
        Span(COMPUTE, 4.0, 10.0, sync, "wait sync", 1),
    )
    recording = replace(record(program, price(program)), spans=spans, first=2)
    assert exposed_by_tier([recording]) == {"t0": 2.0, "t1": 4.0}


def test_a_slow_outer_tier_is_what_the_step_waits_for() -> None:
    cluster = cluster_with((2, 2), bandwidth=1e6)
    program = build(cluster, preset("zero3", cluster), BLOCKS, 2)
    path = critical_path(record(program, price(program)))
    places = by_place(path.seconds)
    assert next(iter(places)) == "t1"
    assert places["t1"] > 0.5 * path.step_s
    words = critical_words(path)
    assert words.startswith(f"On the critical path of the step: {round(100 * places['t1'] / path.step_s)} % ")
    assert "messages on tier t1 (" in words
    exposed = exposed_by_tier([record(program, price(program))])
    assert exposed["t1"] > exposed["t0"] > 0


def _words_of_waits(plan: str, sizes: tuple[int, ...], prefetch: int = 1) -> list[str]:
    cluster = cluster_with(sizes, bandwidth=1e7)
    program = build(cluster, replace(preset(plan, cluster), prefetch=prefetch), BLOCKS, 2)
    compute = rows.recording_rows(record(program, price(program)))[0]
    return [str(span.what) for span in compute.spans if span.category.startswith("wait ")]


def test_a_wait_names_the_messages_it_outlasts(monkeypatch: pytest.MonkeyPatch) -> None:
    words = _words_of_waits("three-level", (2, 2, 2))
    assert "wait gather: FORWARD b0 m0 waits for REFRESH b0, then GATHER b0 for forward" in words
    assert "wait control: CLIP" in words
    alone = _words_of_waits("three-level", (1, 2, 2))  # in a package of one nothing is gathered
    assert "wait refresh: FORWARD b0 m0 waits for REFRESH b0" in alone
    assert not any("GATHER" in words for words in alone)
    queued = "wait reduce: BACKWARD b2 m1 waits for GATHER b1 for backward, then {}, then REDUCE b4 m1"
    assert queued.format("GATHER b0 for backward") in _words_of_waits("zero3", (2, 2), prefetch=4)
    monkeypatch.setattr(rows, "_MAX_NAMED", 2)
    assert queued.format("1 more") in _words_of_waits("zero3", (2, 2), prefetch=4)


def test_one_rank_computes_all_the_time() -> None:
    cluster = cluster_with((1,))
    program = build(cluster, preset("zero3", cluster), BLOCKS, 2)
    path = critical_path(record(program, price(program)))
    assert list(by_place(path.seconds)) == [""]
    assert "100 % compute (" in critical_words(path)
    assert critical_words(path).endswith("The compute stream waits for 0 % of the step.")


@settings(max_examples=100, deadline=None)
@given(priced())
def test_memory_over_the_step_keeps_the_formula(case: tuple[Program, Costs]) -> None:
    """Gathered blocks peak exactly as the formula says; full gradients at most as high."""
    program, costs = case
    curve = memory_curve(record(program, costs))
    formula = model_state_bytes(program.cluster, program.plan, program.blocks, program.num_micros)
    assert max(curve.varying_bytes["gathered"]) == formula["gathered"]
    assert max(curve.varying_bytes["grads_full"]) <= formula["grads_full"]
    assert curve.peak[0] <= sum(formula.values())
    assert all(values[-1] == 0 and min(values) >= 0 for values in curve.varying_bytes.values())
    assert list(curve.times_s) == sorted(curve.times_s)
    assert curve.constant_bytes.keys() | curve.varying_bytes.keys() == formula.keys() | {"activations"}


def test_slow_reductions_reach_the_formula_s_peak_of_gradients() -> None:
    cluster = cluster_with((2, 2), bandwidth=1e4)
    program = build(cluster, preset("zero2", cluster), BLOCKS, 2)
    curve = memory_curve(record(program, price(program)))
    formula = model_state_bytes(cluster, program.plan, BLOCKS, 2)
    assert max(curve.varying_bytes["grads_full"]) == formula["grads_full"] > 0


def test_activations_are_kept_from_forward_to_backward() -> None:
    cluster = cluster_with((1,))
    for unit, micros_at_once in ((1, 1), (2, 2)):
        program = build(cluster, replace(preset("ddp", cluster), unit=unit), BLOCKS, 4)
        recording = record(program, price(program))
        held = [Held(100 * (i + 1), 0, 7, 0) for i in range(5)]
        curve = memory_curve(recording, held)
        assert max(curve.varying_bytes["activations"]) == micros_at_once * sum(each.kept for each in held) + 7
        assert curve.varying_bytes["activations"][-1] == 0
        assert not any(memory_curve(recording).varying_bytes["activations"])
    with pytest.raises(ValueError, match="activations of 4 blocks for a program of 5"):
        memory_curve(recording, held[:4])


def test_a_stage_of_a_pipeline_is_refused() -> None:
    cluster = cluster_with((2,))
    dims = (("hidden", 64), ("intermediate", 64))
    blocks = tuple(replace(block, params=(replace(block.params[0], dims=dims),)) for block in BLOCKS)
    plan = replace(preset("ddp", cluster), mapping={cluster.tiers[0].name: {"pipeline": 2}})
    program = build(cluster, plan, blocks, 1, sequence=4)
    for play in (simulate, record):
        with pytest.raises(ProgramError, match="the program of stage 0 talks to other stages: simulate all 2"):
            play(program, price(program))


@pytest.mark.parametrize("name", in_turns(3, sorted(PRESETS)))
def test_changes_are_valid_plans_and_what_they_promise(name: str) -> None:
    cluster = cluster_with((2, 2, 2), bandwidth=1e7)
    plan = replace(preset(name, cluster), recompute=("b*",))
    step = step_of(cluster, plan, 4)
    found = changes(step)
    assert [change.step_s for change in found] == sorted(change.step_s for change in found)
    assert found == changes(step)
    assert {"prefetch = 2", "unit = 2", "recompute = []"} <= {change.words for change in found}
    plans = [change.plan for change in found if change.kind == "plan"]
    assert plan not in plans
    assert all(plans.count(other) == 1 for other in plans)
    for change in found:
        validate(change.cluster, change.plan, BLOCKS)
        changed = build(change.cluster, change.plan, BLOCKS, 4)
        verify(changed)
        assert change.step_s == simulate(changed, price(changed)).step_s


@settings(max_examples=25, deadline=None)
@given(settings_of_a_step(max_world=16))
def test_changes_of_any_plan_can_run(setting: Setting) -> None:
    work = (1e6,) * len(setting.blocks)
    found = changes(step_of(setting.cluster, setting.plan, setting.num_micros, setting.blocks, work))
    assert found
    for change in found:
        verify(build(change.cluster, change.plan, setting.blocks, setting.num_micros))


def test_the_best_change_of_a_plan_that_gathers_over_slow_links_moves_the_parameters() -> None:
    cluster = cluster_with((2, 2), bandwidth=1e6)
    program = build(cluster, preset("zero3", cluster), BLOCKS, 4)
    step_s = simulate(program, price(program)).step_s
    found = changes(step_of(cluster, program.plan, 4))
    best = best_change(found, step_s, "plan")
    assert best is not None
    assert best.step_s == min(change.step_s for change in found if change.kind == "plan") < step_s
    wider = best_change(found, step_s, "cluster")
    assert wider is not None
    assert wider.words == "bandwidth of tier t1 x 2"
    assert best_change(found, 0.0, "plan") is None


def test_a_change_that_does_not_fit_the_device_is_no_candidate() -> None:
    cluster = cluster_with((2, 2))
    plan = preset("zero3", cluster)
    needed = sum(model_state_bytes(cluster, plan, BLOCKS, 1).values())
    small = replace(cluster, device=replace(cluster.device, memory_bytes=1.2 * needed, headroom="0%"))
    words = {change.words for change in changes(step_of(small, plan, 1))}
    everything = {change.words for change in changes(step_of(cluster, plan, 1))}
    assert words < everything
    assert any(word.startswith("params = ") for word in everything - words)
