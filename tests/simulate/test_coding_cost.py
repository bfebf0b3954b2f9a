"""The cost of coding and decoding block formats: bytes counted by hand, and the step that pays for them."""

from dataclasses import replace

import pytest

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.hops import hops_coding_bytes
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.routes import block_hops
from terrace.plan.wire import MessageClass, parse_format
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from tests.support.toys import cluster_of, with_wires

NUMEL = 4096
BLOCKS = tuple(BlockSpec(name=f"b{i}", params=(ParamSpec(name="w", shape=(64, 64)),)) for i in range(3))


def narrow(name: str, cluster: Cluster, wire: dict[str, dict[str, str]]) -> tuple[Layout, Plan]:
    plan = replace(preset(name, cluster), compute="bf16", master="fp32", wire=wire)
    return Layout.of(cluster, plan), plan


def coding_bytes(layout: Layout, plan: Plan, message: MessageClass) -> float:
    return hops_coding_bytes(plan, message, *block_hops(layout, plan, message, NUMEL))


def test_a_reduction_codes_what_it_sends_on_every_hop() -> None:
    cluster = cluster_of(2, 4)
    layout, plan = narrow("zero3", cluster, {"reduce": {"package": "int8", "node": "int4+feedback"}})
    int8, int4 = parse_format("int8"), parse_format("int4")
    inner = 1 * 2048 * (2 + 2 * 4) + 2 * int8.message_bytes(2048)  # bf16 in, sums in fp32
    outer = 3 * 512 * (4 + 2 * 4 + 2 * 4) + 2 * 3 * int4.message_bytes(512)  # sums in, a residual read and written
    assert coding_bytes(layout, plan, MessageClass.REDUCE) == inner + outer


def test_a_gather_codes_once_and_decodes_the_whole() -> None:
    cluster = cluster_of(2, 4)
    layout, plan = narrow("zero3", cluster, {"gather": {"package": "int8", "node": "int8"}})
    part = parse_format("int8").message_bytes(512)
    assert coding_bytes(layout, plan, MessageClass.GATHER) == 512 * 2 + part + 8 * (512 * 2 + part)
    apart = replace(plan, wire={"gather": {"package": "int8", "node": "int4"}})
    twice = 512 * 2 * (1 + 4) + 5 * parse_format("int4").message_bytes(512)
    twice += 2048 * 2 * (1 + 2) + 3 * parse_format("int8").message_bytes(2048)
    assert coding_bytes(layout, apart, MessageClass.GATHER) == twice


def test_sparse_messages_are_selected_once_and_added_where_they_have_elements() -> None:
    cluster = cluster_of(2, 4)
    topk, selected = parse_format("topk:32+feedback"), 3 * 4 + 2
    layout, plan = narrow("ddp", cluster, {"sync": {"package": "topk:32+feedback", "node": "topk:32+feedback"}})
    each = topk.message_bytes(4096)  # 128 elements of it are added to the sum of each of 8 ranks
    whole = 4096 * (4 + 2 * 4 + selected + 4) + each + 8 * (each + 128 * 2 * 4)
    assert coding_bytes(layout, plan, MessageClass.SYNC) == whole
    layout, plan = narrow("zero2", cluster, {"reduce": {"package": "topk:32"}})
    part = 2048 * (2 + selected) + 64 * 2 * 4 + 2 * topk.message_bytes(2048)
    assert coding_bytes(layout, plan, MessageClass.REDUCE) == part


@pytest.mark.parametrize("name", ["ddp", "zero3", "zero++", "three-level"])
def test_dtypes_cost_no_coding(name: str) -> None:
    cluster = cluster_of(2, 2, 2)
    program = build(cluster, with_wires(cluster, preset(name, cluster), "bf16"), BLOCKS, 2)
    block_messages = [each for each in program.instructions if each.op in (Op.GATHER, Op.REDUCE)]
    assert not any(program.message(each).coding_bytes for each in block_messages)
    assert program.message(Instruction(Op.CLIP)).coding_bytes == 0


def test_a_slow_codec_lengthens_the_step_and_a_dtype_does_not_care() -> None:
    def step_s(wire: str, codec: float) -> float:
        cluster = cluster_of(2, 2, 2)
        cluster = replace(cluster, device=replace(cluster.device, kernels=replace(cluster.device.kernels, codec=codec)))
        program = build(cluster, with_wires(cluster, preset("zero3", cluster), wire), BLOCKS, 1)
        return simulate(program, step_costs(program, [1e6] * len(BLOCKS))).step_s

    assert step_s("int8", 0.01) > step_s("int8", 1.0)
    assert step_s("bf16", 0.01) == step_s("bf16", 1.0)


def test_only_what_trains_has_weight_gradients_to_pay_for() -> None:
    """Of a block whose matrices are half frozen, half of the weight gradients are priced; of a frozen one none."""
    cluster = load_cluster("local")
    half = BlockSpec(
        name="half", params=(ParamSpec(name="a", shape=(8, 8)), ParamSpec(name="b", shape=(8, 8), trainable=False))
    )
    whole = BlockSpec(name="whole", params=(ParamSpec(name="a", shape=(16, 8)),))
    frozen = BlockSpec(name="frozen", params=(ParamSpec(name="a", shape=(16, 8), trainable=False),))
    head = BlockSpec(name="head", params=(ParamSpec(name="a", shape=(8, 8)),))
    program = build(cluster, preset("ddp", cluster), (whole, half, frozen, head), 1)
    costs = step_costs(program, [1e9] * 4)
    assert costs.weight_s[0] == pytest.approx(costs.forward_s[0])
    assert costs.weight_s[1] == pytest.approx(costs.weight_s[0] / 2)
    assert costs.weight_s[2] == 0
    assert costs.backward_s[1] == pytest.approx(1.5 * costs.forward_s[1])
