"""The programs of a pipeline, played together: published bubbles, the orders' own timeline, waits of stages."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ProgramError
from terrace.cluster.cluster import Cluster, Device, Kernels, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.config import parse_model
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import BETWEEN_STAGES
from terrace.planner.evaluate import Evaluator
from terrace.planner.stages import traits
from terrace.planner.task import Candidate, Placement, Task
from terrace.program.instruction import PASSES, Instruction, Op
from terrace.program.lowering import build_stages
from terrace.program.program import Program
from terrace.program.schedules.csv_form import as_schedule
from terrace.program.schedules.orders import Orders, most_due
from terrace.program.schedules.registry import orders_for
from terrace.program.schedules.seconds import TaskSeconds
from terrace.simulate.cost import Costs
from terrace.simulate.curve import memory_curve
from terrace.simulate.held_activations import Held, activation_bytes
from terrace.simulate.stages import StagesStep, record_stages, simulate_stages
from terrace.simulate.timeline import play
from tests.support.bubbles import Row, rows, weight_share
from tests.support.byte_formula import step_bytes
from tests.support.planner_cases import mesh_of
from tests.support.schedules import any_orders, even_seconds, seconds_of
from tests.support.totals import verify_stages
from tests.support.toys import cluster_of

ENDLESS = 1e18  # bytes/s: a message takes its latency alone
HIDDEN = 8


def cluster(num_stages: int, edge_s: float, num_data: int = 1) -> Cluster:
    device = Device(
        name="any",
        memory_bytes=1e12,
        memory_bandwidth_bytes_per_s=ENDLESS,
        peak_flops_per_s={"fp32": ENDLESS},
        kernels=Kernels(launch_s=0.0, optimizer_s=0.0),
    )
    tiers = [Tier(name="node", size=num_stages, bandwidth_bytes_per_s=ENDLESS, latency_s=edge_s)]
    if num_data > 1:
        tiers.insert(0, Tier(name="pair", size=num_data, bandwidth_bytes_per_s=ENDLESS, latency_s=0.0))
    return Cluster(name="any", device=device, tiers=tuple(tiers))


def blocks_of(num: int) -> tuple[BlockSpec, ...]:
    dims = (("hidden", HIDDEN), ("intermediate", HIDDEN))
    return tuple(
        BlockSpec(name=f"b{i}", params=(ParamSpec(name="w", shape=(HIDDEN, HIDDEN), dims=dims),)) for i in range(num)
    )


def stage_plan(num_stages: int, num_virtual: int, **changes: object) -> Plan:
    plan = Plan(
        params="device",
        grads="device",
        optimizer="device",
        mapping={"node": {"pipeline": num_stages}},
        schedule="1f1b",
        stages=(1,) * num_virtual,
    )
    return replace(plan, **changes)  # type: ignore[arg-type]


def played(orders: Orders, seconds: TaskSeconds, edge_s: float) -> tuple[StagesStep, list[Program]]:
    """The step of `priced_orders`."""
    programs, costs = priced_orders(orders, seconds, edge_s)
    return simulate_stages(programs, costs), programs


def priced_orders(orders: Orders, seconds: TaskSeconds, edge_s: float) -> tuple[list[Program], list[Costs]]:
    """Every virtual stage is one block with the seconds of its tasks."""
    programs = build_stages(
        cluster(orders.num_stages, edge_s),
        replace(stage_plan(orders.num_stages, orders.num_virtual), schedule=as_schedule(orders)),
        blocks_of(orders.num_virtual),
        orders.num_micros,
        sequence=4,
    )
    costs = [
        Costs(
            forward_s=seconds.forward_s,
            backward_s=tuple(i + w for i, w in zip(seconds.input_s, seconds.weight_s, strict=True)),
            weight_s=seconds.weight_s,
            update_s=(0.0,) * orders.num_virtual,
            program=program,
        )
        for program in programs
    ]
    return programs, costs


def bubble(step: StagesStep) -> float:
    """The share of the longest span in which stages do not compute (Qi et al. 2401.10241, section 5.3)."""
    spans = [passes[-1].end_s - passes[0].start_s for passes in step.passes]
    busy = [sum(each.end_s - each.start_s for each in passes) for passes in step.passes]
    return 1 - sum(busy) / (len(spans) * max(spans))


@rows
def test_programs_have_the_published_bubbles_to_four_decimals(row: Row) -> None:
    model, micros, _, forward_s, input_s, weight_s, edge_s, *published = row
    seconds = TaskSeconds(
        forward_s=(forward_s,) * 8,
        backward_s=(input_s + weight_s,) * 8,
        input_s=(input_s,) * 8,
        weight_s=(weight_s,) * 8,
        edge_s=(edge_s,) * 7,
    )
    share = {"seconds": seconds, "weight_share": weight_share(model)}
    wanted = dict(zip(("1f1b", "zb-h1", "zb-h2", "zb-1p", "zb-2p"), (published[0], *published[2:]), strict=True))
    for name, rate in wanted.items():
        orders = orders_for(name, num_stages=8, num_micros=micros, **(share if name.endswith("p") else {}))
        step, _ = played(orders, seconds, edge_s)
        assert round(bubble(step), 4) == rate, name


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_programs_are_played_as_their_orders_are(data: st.DataObject) -> None:
    """Whatever the seconds: every pass begins when the timeline of the orders says it does.

    Messages are free, since those of one rank leave one after the other and the timeline's do not.
    """
    orders = data.draw(any_orders())
    if orders.num_stages == 1:
        return
    seconds = replace(data.draw(seconds_of(orders.num_virtual)), edge_s=(0.0,) * (orders.num_virtual - 1))
    seconds = replace(seconds, backward_s=tuple(i + w for i, w in zip(seconds.input_s, seconds.weight_s, strict=True)))
    step, _ = played(orders, seconds, 0.0)
    timeline = play(orders, seconds)
    for passes, starts in zip(step.passes, timeline.starts_s, strict=True):
        begin = step.passes[0][0].start_s - timeline.starts_s[0][0]
        assert [each.start_s - begin for each in passes] == pytest.approx(starts, abs=1e-6)


def test_seconds_sum_to_the_same_step_on_every_stage_and_bytes_are_the_formulas() -> None:
    machine = cluster(4, 1e-3, num_data=2)
    plan = replace(
        preset("zero2", machine), mapping={"node": {"pipeline": 4}}, schedule="zb-h1", compute="fp32", wire={}
    )
    programs = build_stages(machine, plan, blocks_of(8), 6, sequence=4)
    costs = [
        Costs(forward_s=(1.0,) * 8, backward_s=(2.0,) * 8, weight_s=(1.0,) * 8, update_s=(0.1,) * 8, program=program)
        for program in programs
    ]
    step = simulate_stages(programs, costs)
    whole = {round(report.step_s, 6) for report in step.reports}
    assert len(whole) == 1
    for program, report in zip(programs, step.reports, strict=True):
        declared = step_bytes(machine, plan, program.blocks, 6, 4, program.stage)
        assert dict(report.sent_bytes) == {key: size for key, size in declared.items() if size}
        assert report.time_s["forward"] == pytest.approx(6 * len(program.stage.own))
        assert report.time_s["wait pipeline"] > 0
    middle = step_bytes(machine, plan, programs[1].blocks, 6, 4, programs[1].stage)
    assert [middle[message, "node"] for message in BETWEEN_STAGES] == [6 * 4 * HIDDEN * 4] * 2


def test_a_circle_between_stages_is_named() -> None:
    machine = cluster(2, 0.0)
    programs = build_stages(machine, stage_plan(2, 2), blocks_of(2), 2, sequence=4)
    sent = next(i for i, each in enumerate(programs[0].instructions) if each.op is Op.SEND)
    lost = replace(
        programs[0], instructions=tuple(each for i, each in enumerate(programs[0].instructions) if i != sent)
    )
    costs = [
        Costs(forward_s=(1.0,) * 2, backward_s=(2.0,) * 2, update_s=(0.0,) * 2, program=program)
        for program in (lost, programs[1])
    ]
    with pytest.raises(
        ProgramError,
        match="in a circle: stage 0 for the gradient of b1, micro-batch 0, from stage 1; stage 1 ",
    ):
        simulate_stages([lost, programs[1]], costs)


def test_a_cluster_of_cpus_plays_a_pipeline_by_the_clock_of_the_wall() -> None:
    """Messages share the cores there, so a rank's own clock stands still at times: stages meet at the wall's time."""
    machine = cluster_of(2, 2)
    plan = replace(
        preset("zero3", machine), mapping={"node": {"pipeline": 2}}, schedule="1f1b", compute="fp32", wire={}
    )
    programs = build_stages(machine, plan, blocks_of(6), 4, sequence=4)
    costs = [
        Costs(forward_s=(1e-4,) * 6, backward_s=(2e-4,) * 6, weight_s=(1e-4,) * 6, update_s=(0.0,) * 6, program=program)
        for program in programs
    ]
    first, second = simulate_stages(programs, costs).reports
    assert first.step_s == pytest.approx(second.step_s, rel=0.02)


LAYERED = {
    "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.mark.parametrize("place", [-1, 1])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "zbv", "zeropp"])
def test_the_price_of_a_pipeline_is_near_what_its_programs_take(place: int, schedule: str) -> None:
    """Where parameters are gathered within a twentieth, else within a hundredth."""
    machine = load_cluster("frontier").resized(4)
    task = Task(model=parse_model(LAYERED), cluster=machine, batch=256, sequence=2048)
    chunks, unit = traits()[schedule].chunks[0], 4 if schedule == "zeropp" else 1
    mesh = mesh_of((2, 1, 1, 1), (4, 1, 1, 1), (1, 1, 1, 4))
    candidate = Candidate(0, unit, schedule, chunks, 1, Placement(place, place, place), mesh)
    evaluator = Evaluator(task)
    price_s, played_s = evaluator.prices.step_s(candidate), evaluator.played(candidate).step_s
    assert price_s / played_s - 1 == pytest.approx(0.0, abs=0.05 if place > 0 else 0.01)


def tied(*tied_to: tuple[int, ...]) -> list[Program]:
    """Two stages of two blocks, of which those of the second borrow."""
    blocks = [replace(block, tied_to=lent) for block, lent in zip(blocks_of(4), ((), (), *tied_to), strict=True)]
    return build_stages(cluster(2, 0.0), stage_plan(2, 2, stages=(2, 2)), blocks, 2, sequence=4)


def test_two_stages_tie_the_same_block_at_a_time() -> None:
    first, second = tied((0,), (1,))
    verify_stages([first, second])
    mine = [each for each in second.instructions if each.op is Op.TIE or (each.op is Op.SYNC and each.block < 2)]
    swapped = dict(zip(mine, mine[2:] + mine[:2], strict=True))
    other = replace(second, instructions=tuple(swapped.get(each, each) for each in second.instructions))
    with pytest.raises(ProgramError, match=r"circle: rank 0 waits in `TIE b0 .* for rank 1; rank 1 waits in `TIE b1"):
        verify_stages([first, other])


def test_a_copy_may_be_borrowed_twice() -> None:
    verify_stages(tied((0,), (0,)))


def test_activations_are_those_of_the_instructions() -> None:
    """Forwards moved to the front keep more, whatever the schedule says."""
    by_block = [Held(1, 0, 0, 0)] * 4
    one_f_one_b = build_stages(cluster(2, 0.0), stage_plan(2, 2, stages=(2, 2)), blocks_of(4), 8, sequence=4)[0]
    assert activation_bytes(one_f_one_b, by_block) == 4  # two micro-batches of two blocks
    eager = sorted(one_f_one_b.instructions, key=lambda each: each.op is not Op.FORWARD)
    assert activation_bytes(replace(one_f_one_b, instructions=tuple(eager)), by_block) == 16


def peak_by_definition(program: Program, by_block: list[Held]) -> int:
    """The most that is held while a pass runs: of every micro-batch, what has begun and not ended."""
    passes = [each for each in program.instructions if each.op in PASSES]
    number = {each: place for place, each in enumerate(passes)}
    peak = 0
    for place, now in enumerate(passes):
        working = {
            Op.FORWARD: by_block[now.block].forward_on_top,
            Op.BACKWARD: by_block[now.block].on_top,
            Op.BACKWARD_INPUT: by_block[now.block].halved_on_top,
            Op.BACKWARD_WEIGHT: 0,
        }
        held = working[now.op]
        for block in program.stage.own:
            for micro in range(program.num_micros):
                forward, whole, half, rest = (number.get(Instruction(op, block, micro)) for op in working)
                freed = half if whole is None else whole
                assert forward is not None
                assert freed is not None
                if forward <= place <= freed:
                    held += by_block[block].kept
                elif rest is not None and freed < place <= rest:
                    held += by_block[block].due
        peak = max(peak, held)
    return peak


@settings(max_examples=60, deadline=None)
@given(any_orders().filter(lambda orders: orders.num_stages > 1), st.data())
def test_activations_are_those_that_have_begun_and_not_ended(orders: Orders, data: st.DataObject) -> None:
    """At every pass of any schedule; and the curve over time peaks at the same figure."""
    numbers = st.integers(0, 9)
    by_block = [Held(*data.draw(st.tuples(*[numbers] * 5))) for _ in range(orders.num_virtual)]
    seconds = even_seconds(orders.num_virtual, forward_s=1.0, input_s=1.0, weight_s=1.0)
    programs, costs = priced_orders(orders, seconds, 0.5)
    for program, recording in zip(programs, record_stages(programs, costs), strict=True):
        peak = activation_bytes(program, by_block)
        assert peak == peak_by_definition(program, by_block)
        assert max(memory_curve(recording, by_block).varying_bytes["activations"]) == peak


def test_activations_change_between_the_halves_of_a_backward() -> None:
    """Of ZB-H1 the second of two stages has two micro-batches between the halves, the first one, each for a moment."""
    plan = stage_plan(2, 2, schedule="zb-h1", stages=(2, 2))
    programs = build_stages(cluster(2, 0.0), plan, blocks_of(4), 8, sequence=4)
    assert most_due(orders_for("zb-h1", num_stages=2, num_micros=8)) == ((1,), (2,))
    for due, peaks in ((10, (22, 40)), (1, (4, 4)), (0, (4, 2))):
        assert tuple(activation_bytes(program, [Held(1, due, 0, 0)] * 4) for program in programs) == peaks, due
