"""A plan as a named software runs it: every cost is paid where the plan has what causes it, and own adds nothing."""

from dataclasses import fields, replace
from itertools import product
from typing import get_args

import pytest

from bench.validation import held_out
from bench.validation.published import step_of
from bench.validation.rows import gpt
from terrace.base.errors import ClusterError, PlanError
from terrace.cli.lines import SOFTWARE as OFFERED
from terrace.cluster.cluster import Cluster
from terrace.cluster.named_software import NAMED, SOFTWARE, run_by, software_named
from terrace.cluster.presets import load_cluster
from terrace.cluster.software import OWN, KernelForms, MessageForms, Software
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.as_software import check_software, run_as
from terrace.plan.kinds import Kinds
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from terrace.planner.evaluate import Evaluator
from terrace.planner.pins import Pins
from terrace.planner.schedule_pins import schedules
from terrace.planner.search import find
from terrace.planner.space import Space, context_forms, open_meshes, passing_units, placements, recomputations
from terrace.planner.task import Candidate, Task, plan_of
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.hidden import hidden_between_nodes
from terrace.simulate.kernels import gemm_s, memory_s
from terrace.simulate.layers import seconds_of
from terrace.simulate.step import Step, predict_step

MODEL = gpt(4, 2048, 16, 2048, 8192)
H100 = load_cluster("dgx-h100").resized(2)
TENSOR = {"node": {"tensor": 4, "data": 2}}


def plan_on(cluster: Cluster, name: str, **keys: object) -> Plan:
    return run_as(cluster, replace(preset(name, cluster), compute="bf16", micro_batch=2, **keys))  # type: ignore[arg-type]


def step_s(cluster: Cluster, plan: Plan) -> float:
    return predict_step(step_on(cluster, plan)).step_s


def step_on(cluster: Cluster, plan: Plan) -> Step:
    work = work_of(cluster, plan, layer_operations(MODEL), 2048)
    return Step(cluster=cluster, plan=plan, blocks=block_specs(MODEL), num_micros=4, sequence=2048, work=work)


def needed(cluster: Cluster, plan: Plan) -> dict[str, int]:
    return footprint(cluster, plan, Kinds.of(block_specs(MODEL)), 2048, 4)


def seconds_as(software: Software, name: str, **keys: object) -> float:
    cluster = run_by(H100, software)
    return step_s(cluster, plan_on(cluster, name, **keys))


def without(software: Software, **messages: object) -> Software:
    return replace(software, messages=replace(software.messages, **messages))  # type: ignore[arg-type]


def test_every_software_states_its_costs_and_their_source() -> None:
    assert get_args(OFFERED) == NAMED
    classes = {message.value for message in MessageClass}
    for name, software in SOFTWARE.items():
        assert software.name == name
        assert software.messages.exposed | software.messages.exposed_unsharded <= classes
        assert bool(software.source) == (software != OWN)
    # No two are one table under two names.
    costs = [tuple(getattr(each, field.name) for field in fields(each)[1:-1]) for each in SOFTWARE.values()]
    assert len(set(costs)) == len(costs)


def test_own_adds_nothing() -> None:
    assert run_by(H100, OWN) == H100
    for name in ("ddp", "zero1", "zero3"):
        plan = replace(preset(name, H100), compute="bf16", micro_batch=2)
        assert run_as(H100, plan) == plan
        empty = run_by(H100, Software(name="empty"))
        assert step_s(empty, plan) == pytest.approx(step_s(H100, plan), rel=1e-12)
        assert needed(empty, plan) == needed(H100, plan)


def test_a_cpu_and_a_second_software_are_refused() -> None:
    with pytest.raises(ClusterError, match="described on GPUs"):
        run_by(load_cluster("local"), software_named("te"))
    with pytest.raises(ClusterError, match="run by te already"):
        run_by(run_by(H100, software_named("te")), software_named("fsdp2"))
    with pytest.raises(ClusterError, match="did you mean 'fsdp2'"):
        software_named("fsdp")


def test_attention_that_writes_its_scores_takes_longer_and_more_memory() -> None:
    plain = run_by(H100, Software(name="plain", kernels=KernelForms(flash=False)))
    plan = plan_on(plain, "ddp")
    assert step_s(plain, plan) > 1.05 * step_s(H100, plan)
    scores = 4 * 2 * 16 * 2048 * 2048 * 2  # layers x rows x heads x scores, in bf16
    more = needed(plain, plan)["activations"] - needed(H100, plan)["activations"]
    assert more >= 0.9 * scores


def test_flash_attention_2_is_slower_on_hopper_alone() -> None:
    flash2 = Software(name="flash2", kernels=KernelForms(attention="flash2"))
    for name, slower in (("dgx-h100", True), ("dgx-a100", False)):
        cluster = load_cluster(name).resized(2)
        plan = plan_on(cluster, "ddp")
        assert (step_s(run_by(cluster, flash2), plan) > 1.01 * step_s(cluster, plan)) is slower


def test_copies_are_paid_by_plans_that_gather_or_reduce_shards() -> None:
    fsdp2 = software_named("fsdp2")
    bare = without(fsdp2, gather_copies=(0.0, 0.0), reduce_copies=(0.0, 0.0))
    assert seconds_as(fsdp2, "ddp") == seconds_as(bare, "ddp")
    # Each micro-batch copies what two gathers bring, 4 bytes an element, and casts what a reduction takes, 6.
    elements = 4 * sum(spec.num_trainable for spec in block_specs(MODEL)[1:-1])
    least = memory_s(H100.device, elements * (4 + 4 + 6), 0)
    more = seconds_as(fsdp2, "zero3") - seconds_as(bare, "zero3")
    assert least < more < 1.3 * least
    layers = ("layers.*",)  # a layer that is computed again is not gathered again
    again = seconds_as(fsdp2, "zero3", recompute=layers) - seconds_as(bare, "zero3", recompute=layers)
    assert again == pytest.approx(more, rel=0.1)


def test_reductions_in_fp32_take_more_seconds_bytes_and_memory() -> None:
    megatron = software_named("megatron")
    cluster = run_by(H100, megatron)
    wide, narrow = (
        predict_step(step_on(cluster, plan_on(run_by(H100, each), "zero1")))
        for each in (megatron, without(megatron, reduced=""))
    )
    assert wide.step_s > narrow.step_s
    sent = [sum(size for (name, _), size in each.sent_bytes[0].items() if name == "sync") for each in (wide, narrow)]
    assert sent[0] >= sent[1] > 0
    reduced = [plan_on(run_by(H100, each), "zero2") for each in (megatron, without(megatron, reduced=""))]
    buffers = [needed(cluster, plan)["buffers"] for plan in reduced]
    assert buffers[0] > buffers[1]


def test_gradients_and_fragments_are_of_the_software_and_of_the_plan() -> None:
    cluster = run_by(H100, software_named("deepspeed"))
    for name, gathers in (("zero1", False), ("zero3", True)):
        plan = plan_on(cluster, name)
        here, own = needed(cluster, plan), needed(H100, plan)
        assert here["grads"] == pytest.approx(own["grads"] / 2, rel=1e-6)
        tensors = sum(here.values()) - here["allocator"] - here["context"]
        lost = 1 / (1 - 0.15) - 1 if gathers else 0.05
        assert here["allocator"] == pytest.approx(lost * tensors, rel=1e-3)


@pytest.mark.parametrize(("name", "message"), [("zero1", "sync"), ("zero2", "reduce"), ("zero3", "gather")])
def test_what_is_waited_for_adds_to_the_step(name: str, message: str) -> None:
    waits = Software(name="waits", messages=MessageForms(exposed=frozenset((message,))))
    plan = plan_on(H100, name)
    assert step_s(run_by(H100, waits), plan) > 1.002 * step_s(H100, plan)
    unsharded = Software(name="waits", messages=MessageForms(exposed_unsharded=frozenset((message,))))
    expected = H100 if name == "zero3" else run_by(H100, waits)
    assert step_s(run_by(H100, unsharded), plan) == pytest.approx(step_s(expected, plan))
    assert step_s(run_by(H100, waits), plan_on(H100, "zero1", mapping=TENSOR)) >= step_s(
        H100, plan_on(H100, "zero1", mapping=TENSOR)
    )


def test_messages_that_are_waited_for_are_not_said_to_be_hidden() -> None:
    waits = Software(name="waits", messages=MessageForms(exposed=frozenset(("sync", "refresh"))))
    found = []
    for cluster in (H100, run_by(H100, waits)):
        hidden = hidden_between_nodes(predict_step(step_on(cluster, plan_on(cluster, "zero1"))))
        assert hidden is not None
        found.append(hidden.hidden_s)
    assert found[0] > found[1] == 0.0


def test_messages_of_a_bucket_share_the_latency_of_a_ring() -> None:
    ring = Software(name="ring", messages=MessageForms(rings=True))
    bucketed = without(ring, bucket=(1e9, 0.0))
    wide = load_cluster("dgx-h100").resized(128)
    plan = plan_on(wide, "zero1")
    alone_s, together_s = (step_s(run_by(wide, each), plan) for each in (ring, bucketed))
    assert together_s < alone_s


def test_te_fuses_messages_and_quantises_otherwise() -> None:
    te = run_by(H100, software_named("te"))
    plan = plan_on(te, "zero1", mapping=TENSOR, products="fp8")
    assert plan.tensor_chunks == "fused"
    assert plan_on(te, "zero1").tensor_chunks == 1
    own = replace(plan, tensor_chunks=1)
    assert step_s(te, plan) < step_s(te, own) < step_s(H100, own)
    in_bf16 = replace(own, products=None)
    assert step_s(te, in_bf16) == pytest.approx(step_s(H100, in_bf16), rel=0.02)


def test_recomputation_that_stops_early_leaves_out_the_last_product() -> None:
    stops = Software(name="stops", kernels=KernelForms(stops_early=True))
    layer, device = block_specs(MODEL)[1], run_by(H100, stops).device
    work = work_of(H100, plan_on(H100, "ddp"), layer_operations(MODEL), 2048)
    found = seconds_of(device, replace(work, recompute="full"), layer)
    last_s = gemm_s(device, 4096, 8192, 2048) + memory_s(device, 3 * 2 * 4096 * 2048)
    assert found.forward_s - found.recompute_s == pytest.approx(last_s)
    plan = plan_on(H100, "ddp", recompute=("layers.*",))
    saved = step_s(H100, plan) - step_s(run_by(H100, stops), plan)
    assert saved == pytest.approx(4 * 4 * last_s, rel=0.02)


@pytest.mark.parametrize("name", ["megatron", "fsdp2", "deepspeed"])
def test_a_search_finds_plans_of_a_software_at_the_price_that_it_plays(name: str) -> None:
    cluster = run_by(H100, software_named(name))
    task = Task(model=MODEL, cluster=cluster, batch=64, sequence=2048)
    evaluator = Evaluator(task)
    found, _ = find(Space(task=task, axes=("data", "tensor"), pins=Pins()), count=3, evaluator=evaluator)
    assert found.best
    for each in found.best:
        played = evaluator.played(each.candidate)
        assert played.step_s == each.step_s
        assert evaluator.prices.step_s(each.candidate) == pytest.approx(played.step_s, rel=0.1)


# Of every software that a command offers: plans that it does not run, and what the error names.
REFUSED = [
    ("megatron", "zero3", {}, "params = 'system', grads = 'system'"),
    ("megatron", "three-level", {}, "params = 'node', grads = 'node'"),
    ("megatron", "zero1", {"mapping": {"node": {"context": 8}}}, "8 ring ranks"),
    ("megatron", "ddp", {"recompute": ("layers.*: mlp",)}, "recompute of mlp alone.*attention or whole layers"),
    ("megatron", "ddp", {"products": "fp8"}, "products = 'fp8'"),
    ("te", "zero1", {"mapping": {"node": {"tensor": {"columns": 2, "rows": 4}}}}, "2 tensor columns"),
    ("fsdp2", "zero1", {}, "optimizer = 'system'.*ddp, zero2 or zero3"),
    ("fsdp2", "zero3", {"unit": 2}, "unit = 2"),
    ("fsdp2", "three-level-compressed", {}, "params = 'node'"),
    ("deepspeed", "zero++", {}, "wire with int4 or int8"),
    ("deepspeed", "zero1", {"mapping": TENSOR}, "4 tensor ranks"),
    ("deepspeed", "zero1", {"mapping": {"node": {"context": {"ring": 8}}}}, "8 ring ranks"),
    ("nanotron", "zero1", {"mapping": {"node": {"pipeline": 8}}, "schedule": "zbv"}, "schedule = 'zbv'"),
    ("nanotron", "zero1", {"optimizer_states": "int8"}, "optimizer_states = 'int8'"),
]


@pytest.mark.parametrize(("software", "name", "keys", "named"), REFUSED)
def test_a_plan_that_a_software_does_not_run_is_refused(
    software: str, name: str, keys: dict[str, object], named: str
) -> None:
    cluster = run_by(H100, software_named(software))
    with pytest.raises(PlanError, match=named) as raised:
        validate(cluster, plan_on(cluster, name, **keys), block_specs(MODEL))
    assert f": software {software!r} is not described for it; " in str(raised.value)


RUN = [
    ("megatron", "zero1", {"mapping": TENSOR, "recompute": ("layers.*: attention",)}),
    ("te", "zero1", {"mapping": {"node": {"context": {"ulysses": 8}}}, "products": "fp8"}),
    ("fsdp2", "hsdp", {}),
    ("fsdp2", "zero2", {"mapping": {"node": {"pipeline": 2, "data": 4}}, "schedule": "zbv"}),
    ("deepspeed", "zero3", {"params_backward": "node"}),
    ("nanotron", "ddp", {"mapping": {"node": {"pipeline": 8}}, "schedule": "gpipe"}),
]


@pytest.mark.parametrize(("software", "name", "keys"), RUN)
def test_a_plan_that_a_software_runs_is_not_refused(software: str, name: str, keys: dict[str, object]) -> None:
    cluster = run_by(H100, software_named(software))
    validate(cluster, plan_on(cluster, name, **keys), block_specs(MODEL))


@pytest.mark.parametrize("name", NAMED[1:])
def test_a_search_finds_no_plan_that_the_software_does_not_run(name: str) -> None:
    """Of every shape, placement, schedule and recomputation of the space, not of the best alone."""
    cluster = run_by(H100, software_named(name))
    space = Space(task=Task(model=MODEL, cluster=cluster, batch=64, sequence=2048))
    task, number = space.task, 0
    for mesh in (each for shape in open_meshes(space) for each in context_forms(space, shape)):
        names = schedules(space, mesh.total("pipeline"))
        for placement, (schedule, chunks) in product(placements(space, mesh), names):
            for again in recomputations(space, mesh):
                candidate = Candidate(again, 1, schedule, chunks, 1, placement, mesh)
                check_software(cluster, (plan := plan_of(task, candidate)), Layout.of(cluster, plan))
                number += 1
    assert number > 8
    assert passing_units(space, 4) == (1,)


def test_experts_of_a_software_travel_in_one_chunk() -> None:
    cluster = run_by(H100, software_named("te"))
    keys = {"experts": {"node": {"expert": 8}}}
    assert plan_on(cluster, "zero1", **keys).expert_chunks == {"forward": 1, "backward": 1, "ahead": 1}
    assert plan_on(H100, "zero1", **keys).expert_chunks == {}


def test_every_published_step_is_a_plan_of_the_software_that_ran_it() -> None:
    for line in held_out.lines():
        step = step_of(line, line["software"])
        validate(step.cluster, step.plan, step.blocks)
