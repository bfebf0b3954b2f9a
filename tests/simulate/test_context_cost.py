"""Seconds and memory of the context axis: how its messages are hidden, and which of its forms a plan takes."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.cluster.named_software import run_by
from terrace.cluster.software import MessageForms, Software
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, forward_flops
from terrace.plan.context_traffic import NO_ATTENTION
from terrace.plan.in_block_messages import ContextLeg, ContextMessage
from terrace.plan.mesh import Mesh
from terrace.plan.wire import MessageClass
from terrace.planner.pins import Pins
from terrace.planner.search import find
from terrace.planner.space import Space, closed, open_meshes
from terrace.planner.stages import SERIAL
from terrace.planner.task import Candidate, Placement, Task, num_micros, plan_of
from terrace.program.block_program.attention import attention_moments, attention_steps
from terrace.program.block_program.steps import Compute, Moment, Send, Steps, moments_of
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.sequence.capacity import most_attended, ring_rank_capacity
from terrace.simulate.attention_cost import attention_cost
from terrace.simulate.cost import step_costs
from terrace.simulate.critical import critical_path
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.simulate.inside import Rounds, attention_bytes
from terrace.simulate.layers import core_rounds
from terrace.simulate.links import rate_bytes_per_s, send_s, tier_penalty
from terrace.simulate.recording import record
from terrace.simulate.work import Work
from tests.support.activations import layer_activations
from tests.support.attention_waits import attention_waits
from tests.support.byte_formula import step_bytes
from tests.support.planner_cases import CLUSTERS, SMALL, evaluator_of, gpt, mesh_of, small_task

REPLICATED = Placement(-1, -1, -1)
LAYER = 1  # a block that attends
FORMS: tuple[Mesh, ...] = (  # of tiers of 4 and 4: Ulysses inside, the reverse, both on one tier, one of them alone
    mesh_of((1, 1, 4, 1, 1, 4), (1, 1, 4, 1)),
    mesh_of((1, 1, 4, 1), (1, 1, 4, 1, 1, 4)),
    mesh_of((1, 1, 4, 1, 1, 2), (2, 1, 2, 1)),
    mesh_of((1, 1, 4, 1), (1, 1, 4, 1)),
    mesh_of((1, 1, 4, 1), (2, 1, 2, 1)),
    mesh_of((2, 1, 2, 1), (4, 1, 1, 1)),
    mesh_of((1, 1, 4, 1, 1, 4), (4, 1, 1, 1)),
)


def two_tiers(outer_bytes_per_s: float = 2e9) -> Cluster:
    """Four devices a node, four nodes behind slow links."""
    tiers = (
        Tier(name="node", size=4, bandwidth_bytes_per_s=200e9, latency_s=3e-6),
        Tier(name="system", size=4, bandwidth_bytes_per_s=outer_bytes_per_s, latency_s=1e-5),
    )
    device = Device(
        name="any",
        memory_bytes=80e9,
        memory_bandwidth_bytes_per_s=2e12,
        peak_flops_per_s={"bf16": 312e12},
        overlap_penalty=0.125,
    )
    return Cluster(name="two tiers", device=device, tiers=tiers)


def candidate_of(mesh: Mesh, recompute: int = 0, micro_batch: int = 1) -> Candidate:
    return Candidate(recompute, 1, SERIAL, 1, micro_batch, REPLICATED, mesh)


def program_of(task: Task, candidate: Candidate) -> Program:
    return build(task.cluster, plan_of(task, candidate), task.blocks, num_micros(task, candidate), task.sequence)


def by_hand(program: Program, steps: Steps, first_s: float, later_s: float) -> float:
    """Price the messages one by one, each behind the round that its step names."""
    cluster, waited_s = program.cluster, 0.0
    attention = program.model.context.attention(program.blocks[LAYER])
    left_s: dict[Compute, float] = {}
    for send in (step for step in steps if isinstance(step, Send)):
        (message,) = send.messages
        assert isinstance(message, ContextMessage)
        if message.leg in (ContextLeg.INTO, ContextLeg.BACK):
            for tier, num_bytes in attention.sends(message):
                degree = program.mesh.group("ulysses")[tier]
                waited_s += cluster.tiers[tier].latency_s
                waited_s += num_bytes / rate_bytes_per_s(cluster, tier, num_bytes, degree=degree)
            waited_s += cluster.device.kernels.launch_s
            continue
        ((tier, num_bytes),) = attention.sends(message)
        seconds = send_s(cluster, tier, num_bytes)
        covered_s = 0.0
        if send.behind is not None:
            room_s = left_s.setdefault(send.behind, later_s if send.behind.number else first_s)
            covered_s = min(seconds, room_s)
            left_s[send.behind] -= covered_s
        waited_s += seconds - covered_s + tier_penalty(cluster, tier) * covered_s
    return waited_s


@pytest.mark.parametrize("mesh", FORMS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 50.0])
def test_waits_are_the_closed_form_and_the_messages_priced_one_by_one(mesh: Mesh, scale: float) -> None:
    """Whatever the rounds hide: nothing, some, all. Also the bytes that a task's numbers say are the program's."""
    task = replace(
        small_task(two_tiers(20e9), batch=16, model=gpt(2, 512, 8, vocab=1000, positions=4096)), sequence=4096
    )
    candidate = candidate_of(mesh, recompute=1, micro_batch=2 if mesh.group("data")[1] == 4 else 1)
    program = program_of(task, candidate)
    work = work_of(task.cluster, program.plan, layer_operations(task.model), task.sequence)
    attention = program.model.context.attention(program.blocks[LAYER])
    assert attention == attention_bytes(work, program.mesh.group("ulysses"), program.mesh.group("ring"))
    first, later = ((scale * forward, scale * backward) for forward, backward in core_rounds(task.cluster.device, work))
    rounds: Rounds = (first, later)
    costs = replace(step_costs(program, work), rounds=(rounds,) * len(program.blocks))
    block = program.model.block_program(LAYER)
    forward_s, recomputed_s = (
        costs.waits_inside(Instruction(op, LAYER))[MessageClass.CONTEXT] for op in (Op.FORWARD, Op.BACKWARD)
    )
    assert forward_s == pytest.approx(by_hand(program, block.forward, first[0], later[0]), rel=1e-9)
    backward_s = by_hand(program, block.backward, first[1], later[1])
    assert recomputed_s == pytest.approx(forward_s + backward_s, rel=1e-9)
    assert (forward_s, backward_s) == pytest.approx(attention_waits(task.cluster, attention, rounds), rel=1e-9)
    assert program.model.context.attention(program.blocks[0]) == NO_ATTENTION
    assert costs.waits_inside(Instruction(Op.BACKWARD, 0)) == {}
    waits = Software(name="waits", messages=MessageForms(exposed=frozenset(("context",))))
    alone = step_costs(program_of(replace(task, cluster=run_by(task.cluster, waits)), candidate), work)
    assert alone.waits_inside(Instruction(Op.BACKWARD, LAYER))[MessageClass.CONTEXT] >= recomputed_s


@pytest.mark.parametrize("mesh", FORMS[:4])
def test_a_plan_of_the_context_axis_is_priced_as_its_program_is_simulated(mesh: Mesh) -> None:
    """The same step, bytes and waits in the planner, in the program that runs, and on its critical path."""
    task = replace(small_task(two_tiers(), batch=16, model=gpt(4, 512, 8, vocab=1000, positions=4096)), sequence=1024)
    evaluator, candidate = evaluator_of(task), candidate_of(mesh)
    plan, micros, program = plan_of(task, candidate), num_micros(task, candidate), program_of(task, candidate)
    costs = step_costs(program, work_of(task.cluster, plan, layer_operations(task.model), task.sequence))
    whole = simulate(program, costs)
    assert evaluator.played(candidate).time_s == pytest.approx(whole.time_s)
    assert evaluator.prices.step_s(candidate) == pytest.approx(whole.step_s, rel=0.01)
    sent = {(message.value, tier): count for (message, tier), count in whole.sent_bytes.items()}
    assert evaluator.played(candidate).sent_bytes == sent
    assert whole.sent_bytes == step_bytes(task.cluster, plan, program.blocks, micros, task.sequence)
    # What its price counts is the same computing and the same waits.
    blocks = [evaluator.estimator.block(kind, mesh, 1) for kind in range(3)]
    passes = sum(count * (each.forward_s + each.backward_s) for count, each in zip((1, 4, 1), blocks, strict=True))
    own = math.fsum(whole.time_s[name] for name in ("forward", "backward", "wait context"))
    assert micros * passes == pytest.approx(own, rel=1e-3)  # sums of gradients slow a few of them
    path = critical_path(record(program, costs))
    waited = math.fsum(spent for (_, category), spent in path.seconds.items() if category == "context")
    assert 0.9 * whole.time_s["wait context"] < waited <= whole.time_s["wait context"]


def test_ulysses_goes_inside_a_slow_tier_and_the_ring_across_it() -> None:
    """Long sequences behind slow links: the planner picks it of all forms, and the reverse is slower, simulated."""
    model = replace(gpt(8, 4096, 32, vocab=32000, positions=1 << 17), num_kv_heads=8)
    task = Task(model=model, cluster=two_tiers(6e9), batch=1, sequence=1 << 17)
    found, evaluator = find(Space(task=task, axes=("data", "context")), count=1)
    best = found.best[0].candidate
    assert best.mesh == mesh_of((1, 1, 4, 1, 1, 4), (1, 1, 4, 1))
    mapping = plan_of(task, best).mapping
    assert mapping == {"node": {"context": {"ulysses": 4}}, "system": {"context": {"ring": 4}}}
    reverse = best._replace(mesh=mesh_of((1, 1, 4, 1), (1, 1, 4, 1, 1, 4)))
    steps = {}
    for name, candidate in (("best", best), ("reverse", reverse)):
        program = program_of(task, candidate)
        report = simulate(
            program, step_costs(program, work_of(task.cluster, program.plan, layer_operations(model), task.sequence))
        )
        steps[name] = report.step_s
    assert steps["reverse"] > 1.1 * steps["best"]
    # Bytes by tier of a layer, in elements of one head of 128, with T tokens of 16 ranks: terrace.plan.context_traffic.
    tokens, head = (1 << 17) // 16, 128 * 2
    sent = evaluator.played(best).sent_bytes
    passes = 2 if best.recompute else 1  # of forwards
    across = 3 * tokens * (passes * (8 + 2 * 2 + 8) + 8 + 8 + 2 * 2) * head
    ring = 4 * tokens * 2 * 2 * head
    assert sent["context", "node"] == 8 * across
    assert sent["context", "system"] == 8 * ring * (passes * 3 + 3 + 2 + 1)


def test_the_forms_of_a_space_split_heads_and_chunks() -> None:
    """Every form divides, and a pin leaves the forms that it allows."""
    task = small_task(CLUSTERS["dgx 4x2"], batch=8, model=replace(SMALL, num_kv_heads=2))
    space = Space(task=task)
    seen = set[tuple[int, ...]]()
    for shape in open_meshes(space):
        for form in closed(space, shape) if shape.is_open else ():
            (heads,) = task.heads(form.total("tensor"))
            assert heads.can_split(form.total("ulysses"))
            assert task.sequence % (2 * form.total("ring")) == 0 or form.total("context") == form.total("ulysses")
            seen.add((form.total("ulysses"), form.total("ring")))
    assert {(1, 2), (2, 1), (1, 4), (2, 2), (4, 1), (1, 8), (2, 4), (4, 2)} == seen
    pinned = replace(space, pins=Pins({"ulysses": (2, 2), "ring": (1, 2)}))
    closed_forms = (form for shape in open_meshes(pinned) for form in closed(pinned, shape))
    forms = {(form.total("ulysses"), form.total("context")) for form in closed_forms}
    assert forms == {(2, 2), (2, 4)}


def test_activations_of_a_rank_fall_as_one_over_the_context_ranks() -> None:
    whole = Work(layer=layer_operations(SMALL), sequence=4096)
    for backend in ("cpu", "cuda"):
        kept = partial(layer_activations, backend=backend)
        for ulysses, ring in ((1, 2), (2, 1), (2, 2), (4, 4)):
            part = kept(replace(whole, ulysses=ulysses, ring=ring))
            # With Ulysses the output is kept where it was attended to and, for the next product, where its tokens are.
            twice = 4096 * 512 * 2 if ulysses > 1 else 0
            assert ulysses * ring * part.kept_bytes == kept(whole).kept_bytes + twice
            assert part.backward_peak_bytes < kept(whole).backward_peak_bytes


@pytest.mark.parametrize(("ulysses", "ring", "pooled"), [(1, 1, 4), (2, 2, 2), (4, 1, 8)])
def test_what_costs_balance_is_predicted_for_the_most_that_a_place_may_attend_to(
    ulysses: int, ring: int, pooled: int
) -> None:
    """With data ranks alone, too: operands, output and log-sums of three even shares, and the output that is held."""
    even = Work(layer=layer_operations(SMALL), sequence=4096, ulysses=ulysses, ring=ring)
    assert even.most_attended == even.attended == 4096 // ring
    work = replace(even, balance="cost", pooled=pooled)
    assert work.most_attended == 3 * even.attended
    part = layer_activations(work)
    row = even.attended * 512 // ulysses * 2  # bytes that an even share has in a rank's heads; all 4 have keys
    assert part.saved["attention"] == 3 * (4 * row + even.attended * 4 // ulysses * 4)
    assert part.saved["attention output"] == even.tokens * 512 * 2
    # Gradients of all four, and the keys and gradients of two rounds.
    assert part.backward_peak_bytes >= part.saved["attention"] + 3 * 12 * row
    plan = replace(plan_of(small_task(two_tiers(), batch=16), candidate_of(FORMS[4])), balance="cost")
    assert work_of(two_tiers(), plan, layer_operations(SMALL), 1024).num_ring_ranks == 16  # ring 8, data 2


@given(st.lists(st.integers(1, 500), min_size=1, max_size=40), st.integers(2, 16), st.integers(0, 20))
def test_no_capacity_is_above_the_most_that_is_predicted(lengths: list[int], num_places: int, spare: int) -> None:
    share = -(-sum(lengths) // num_places) + spare
    assert ring_rank_capacity(lengths, num_places, share) <= most_attended(num_places, share)


def test_recomputation_costs_attention_and_products_another_forward() -> None:
    cluster = two_tiers()
    plain, half, whole = (
        attention_cost(cluster, block_specs(SMALL), recomputed=range(1, 1 + number))
        for number in (0, 1, SMALL.num_layers)
    )
    head_s = (
        3 * forward_flops(SMALL, SMALL.num_blocks - 1, 1, 1) / SMALL.num_layers / (312e12 * cluster.device.kernels.gemm)
    )
    assert whole.token_s - head_s == pytest.approx(4 / 3 * (plain.token_s - head_s))
    assert (plain.whole_pair_s, whole.whole_pair_s) == (3.5 * plain.pair_s, 4.5 * plain.pair_s)
    forward_s = plain.ring_s(1 << 16, (4, 2)) - replace(plain, forwards=0).ring_s(1 << 16, (4, 2))
    assert whole.ring_s(1 << 16, (4, 2)) == pytest.approx(plain.ring_s(1 << 16, (4, 2)) + forward_s)
    assert whole.move_s(1, 100) == pytest.approx(1.5 * plain.move_s(1, 100))
    assert plain.token_s < half.token_s < whole.token_s


def test_a_device_without_a_peak_of_the_dtype_is_told_at_once() -> None:
    with pytest.raises(ClusterError, match=r"peak_flops_per_s\.fp64"):
        attention_cost(two_tiers(), block_specs(SMALL), compute="fp64")


def test_with_a_window_nothing_hides_behind_later_rounds() -> None:
    work = Work(layer=layer_operations(replace(SMALL, sliding_window=64)), sequence=1024, ring=4)
    device = two_tiers().device
    windowed, plain = (core_rounds(device, each) for each in (work, replace(work, layer=layer_operations(SMALL))))
    assert plain[1][0] - plain[0][0] == pytest.approx(windowed[1][0])  # results are added, and nothing is multiplied
    assert windowed[1][0] > 0


@given(st.integers(1, 3), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_moments_of_attention_are_counted_as_its_steps_are(ulysses: int, ring: list[int]) -> None:
    def told(moments: tuple[Moment, ...]) -> set[tuple[object, ...]]:
        return {(each.behind, frozenset(each.messages), each.times) for each in moments}

    passes = zip(attention_steps(ulysses, tuple(ring)), attention_moments(ulysses, tuple(ring)), strict=True)
    for steps, counted in passes:
        assert told(moments_of(steps)) == told(counted)
