"""The simulator: bounds that hold for every plan, and the few cases that have a closed answer."""

from collections import defaultdict
from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.presets import PRESETS, preset
from terrace.program.instruction import COLLECTIVES, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.events import simulate
from tests.support.byte_formula import step_bytes
from tests.support.state_formula import model_state_bytes

LOCAL = load_cluster("local")
BLOCKS = tuple(BlockSpec(name=f"b{i}", params=(ParamSpec(name="w", shape=(64, 64 + i)),)) for i in range(5))
FLOPS = [2.0 * 64 * 64 * 256] * len(BLOCKS)


def _cluster(sizes: tuple[int, ...], penalty: float) -> Cluster:
    tiers = tuple(
        Tier(name=f"t{i}", size=size, bandwidth_bytes_per_s=1e8 / 3**i, latency_s=1e-5 * (i + 1))
        for i, size in enumerate(sizes)
    )
    return Cluster(name="test", device=replace(LOCAL.device, overlap_penalty=penalty), tiers=tiers)


def _serial_s(program: Program, costs: Costs) -> float:
    """Every instruction one after the other."""
    compute = {Op.FORWARD: costs.forward_s, Op.BACKWARD: costs.backward_s, Op.UPDATE: costs.update_s}
    total = 0.0
    for instruction in program.instructions:
        if instruction.op in compute:
            total += compute[instruction.op][instruction.block]
        elif instruction.op in COLLECTIVES:
            total += costs.collective_s(instruction)
    return total


def _busiest_lane_s(program: Program, costs: Costs) -> float:
    """The collectives of the busiest lane, one after the other: lanes run beside each other."""
    lanes_s: dict[int, float] = defaultdict(float)
    for instruction in program.instructions:
        if instruction.op in COLLECTIVES:
            lanes_s[program.message(instruction).lane] += costs.collective_s(instruction)
    return max(lanes_s.values(), default=0.0)


def _compute_s(program: Program, costs: Costs) -> float:
    return program.num_micros * (sum(costs.forward_s) + sum(costs.backward_s)) + sum(costs.update_s)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(PRESETS)),
    sizes=st.sampled_from([(1,), (2,), (2, 3), (2, 2, 2), (4, 2)]),
    num_micros=st.integers(1, 4),
    prefetch=st.integers(0, 3),
    penalty=st.sampled_from([0.0, 0.15, 1.0]),
)
def test_overlap_lies_between_the_maximum_and_the_sum(
    name: str, sizes: tuple[int, ...], num_micros: int, prefetch: int, penalty: float
) -> None:
    cluster = _cluster(sizes, penalty)
    plan = replace(preset(name, cluster), prefetch=prefetch)
    program = build(cluster, plan, BLOCKS, num_micros)
    costs = step_costs(program, FLOPS)
    step_s = simulate(program, costs).step_s
    serial_s, compute_s = _serial_s(program, costs), _compute_s(program, costs)
    assert step_s >= compute_s * (1 - 1e-9)
    assert step_s >= _busiest_lane_s(program, costs) * (1 - 1e-9)
    assert step_s <= serial_s * (1 + 1e-9)


@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_who_is_slowed_when_messages_take_longer_than_computing(backend: Literal["cpu", "cuda"]) -> None:
    """With a penalty of 1 a CPU does one after the other; a GPU computes twice as long beside messages that do not."""
    cluster = _cluster((2,), 1.0)
    cluster = replace(cluster, device=replace(cluster.device, backend=backend))
    program = build(cluster, replace(preset("zero3", cluster), prefetch=99), BLOCKS, 1)
    priced = step_costs(program, [1.0] * len(BLOCKS))  # next to nothing
    count = len(BLOCKS)
    costs = replace(priced, forward_s=(1e-6,) * count, backward_s=(1e-6,) * count, update_s=(0.0,) * count)
    message_s = sum(costs.collective_s(each) for each in program.instructions if each.op in COLLECTIVES)
    step_s = simulate(program, costs).step_s
    if backend == "cpu":
        assert step_s == pytest.approx(message_s + 2e-6 * count, rel=1e-9)
    else:
        assert step_s < message_s + 1e-6 * count


def test_a_tier_has_a_penalty_of_its_own() -> None:
    """Links that wait for no core hide behind computing; those that do are as if in turn."""
    base = _cluster((2, 2), 1.0)
    steps = {}
    for penalty in (None, 0.0, 0.5, 1.0):
        cluster = replace(base, tiers=tuple(replace(tier, overlap_penalty=penalty) for tier in base.tiers))
        program = build(cluster, preset("zero3", cluster), BLOCKS, 2)
        steps[penalty] = simulate(program, step_costs(program, FLOPS)).step_s
    assert steps[0.0] < steps[0.5] < steps[1.0] == steps[None]
    mixed = replace(base, tiers=(base.tiers[0], replace(base.tiers[1], overlap_penalty=0.0)))
    program = build(mixed, preset("zero3", mixed), BLOCKS, 2)
    assert steps[0.0] < simulate(program, step_costs(program, FLOPS)).step_s < steps[1.0]


def test_one_rank_has_nothing_to_wait_for() -> None:
    cluster = _cluster((1,), 0.0)
    program = build(cluster, preset("zero3", cluster), BLOCKS, 3)
    costs = step_costs(program, FLOPS)
    report = simulate(program, costs)
    assert report.step_s == pytest.approx(_compute_s(program, costs))
    assert not [category for category in report.time_s if category.startswith("wait")]


def test_prefetch_hides_gathers() -> None:
    cluster = _cluster((2, 2), 0.0)
    without, ahead = (
        build(cluster, replace(preset("zero3", cluster), prefetch=distance), BLOCKS, 2) for distance in (0, 1)
    )
    assert simulate(ahead, step_costs(ahead, FLOPS)).step_s < simulate(without, step_costs(without, FLOPS)).step_s


def test_recomputation_costs_one_more_forward() -> None:
    cluster = _cluster((1,), 0.0)
    plain = build(cluster, preset("ddp", cluster), BLOCKS, 2)
    again = build(cluster, replace(preset("ddp", cluster), recompute=("b*",)), BLOCKS, 2)
    costs = step_costs(plain, FLOPS)
    extra = simulate(again, step_costs(again, FLOPS)).step_s - simulate(plain, costs).step_s
    assert extra == pytest.approx(2 * sum(costs.forward_s))


def test_three_level_beats_zero3_where_the_outer_link_is_slow() -> None:
    """The claim of 3-level partitioning: under accumulation nothing crosses nodes per micro-batch."""
    steps = {}
    for name in ("zero3", "three-level"):
        program = build(LOCAL, preset(name, LOCAL), BLOCKS, 8)
        slow = replace(LOCAL.tiers[2], bandwidth_bytes_per_s=1e6)
        program = build(replace(LOCAL, tiers=(*LOCAL.tiers[:2], slow)), program.plan, BLOCKS, 8)
        steps[name] = simulate(program, step_costs(program, FLOPS)).step_s
    assert steps["three-level"] < 0.5 * steps["zero3"]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_the_report_carries_the_plan_s_formulas(name: str) -> None:
    plan = preset(name, LOCAL)
    program = build(LOCAL, plan, BLOCKS, 2)
    report = simulate(program, step_costs(program, FLOPS))
    assert report.sent_bytes == step_bytes(LOCAL, plan, BLOCKS, 2)
    assert report.memory_bytes == model_state_bytes(LOCAL, plan, BLOCKS, 2)
    assert report.step_s == pytest.approx(sum(report.time_s.values()))
