"""The order of members in a pipeline, and formats by boundary: rules, places of stages, bytes and prices."""

from dataclasses import replace
from itertools import permutations

import pytest

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass, parse_format
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build_stages
from terrace.simulate.carried import stage_costs
from tests.support.toys import MODELS, cluster_of

CLUSTER = cluster_of(2, 3)
BLOCKS = MODELS["deep llama tied"].declared
PIPED = replace(preset("ddp", CLUSTER), mapping={"node": {"pipeline": 3}})
BACK = "pipeline_backward"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"order": (0, 1, 1)},
            r"order = \[0, 1, 1\] is no permutation of the 3 members of tier 'node': name each of 0",
        ),
        ({"order": (0, 1)}, r"order = \[0, 1\] is no permutation"),
        ({"order": (1, 2, 3)}, r"order = \[1, 2, 3\] is no permutation"),
        (
            {"order": (2, 1, 0), "mapping": {}},
            r"order = \[2, 1, 0\] has no effect: .*not the only axis across that tier",
        ),
        (
            {"wire": {"sync": {"node": "bf16, fp32"}}},
            r"only messages between stages \(pipeline and pipeline_backward\)",
        ),
        ({"wire": {"pipeline": {"node": "bf16, fp32, bf16"}}}, r"names 3 formats, .* crosses 2 boundaries: name one"),
        ({"wire": {"pipeline": {"node": "bf16,"}}}, r"'' is not a wire format"),
        ({"wire": {"pipeline": {"node": " bf16"}}}, r"wire.pipeline.node: ' bf16' is not a wire format"),
        (
            {"wire": {BACK: {"node": "bf16, fp16"}}},
            r"wire.pipeline_backward.node = 'bf16, fp16' under compute = 'fp32'",
        ),
        ({"wire": {BACK: {"node": "bf16, int9"}}}, r"'int9' is not a wire format"),
        ({"wire": {"pipeline": {"node": "int8, int8+feedback"}}}, r"int8\+feedback"),
        (
            {"wire": {"pipeline": {"package": "bf16, fp32"}}, "mapping": {"package": {"pipeline": 2}}},
            r"are for the members of the outermost tier 'node', where a pipeline crosses it",
        ),
        (
            {"wire": {"pipeline": {"node": "bf16, fp32"}}, "schedule": "interleaved:2"},
            r"schedule 'interleaved:2' also sends from the last member to the first: write one format, or a schedule",
        ),
    ],
)
def test_orders_and_formats_that_cannot_be_are_refused_in_a_line(changes: dict[str, object], words: str) -> None:
    plan = replace(PIPED, **changes)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=words) as refused:
        build_stages(CLUSTER, plan, BLOCKS, 6, 16)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("sizes", [(2, 3), (1, 4)])
def test_stages_are_where_the_order_says(sizes: tuple[int, int]) -> None:
    """With two stages a member too; every other axis keeps its ranks."""
    cluster = cluster_of(*sizes)
    for inner in ({}, {"package": {"pipeline": sizes[0]}}):
        for order in permutations(range(sizes[1])):
            plan = replace(PIPED, mapping={"node": {"pipeline": sizes[1]}, **inner}, order=order)
            mesh = Mesh.of(cluster, plan)
            inside = mesh.total("pipeline") // sizes[1]
            for stage in range(mesh.total("pipeline")):
                for rank in range(cluster.world_size):
                    there = mesh.at_stage(rank, stage)
                    assert mesh.stage(there) == stage
                    assert cluster.coordinates(there)[-1] == order[stage // inside]
                    assert inner or cluster.coordinates(there)[0] == cluster.coordinates(rank)[0]


def test_each_boundary_sends_the_bytes_of_its_format() -> None:
    formats = ("bf16", "int8:16")
    plan = replace(PIPED, wire={"pipeline": {"node": ", ".join(formats)}}, order=(2, 0, 1), stages=(2, 3, 3))
    programs = build_stages(CLUSTER, plan, BLOCKS, 6, 16)
    numel = 16 * 8  # tokens and hidden size of a micro-batch
    for stage, name in enumerate(formats):
        sent = programs[stage].sent_bytes
        assert sent[MessageClass.PIPELINE, "node"] == 6 * parse_format(name).message_bytes(numel)
        back = programs[stage + 1].sent_bytes[MessageClass.PIPELINE_BACKWARD, "node"]
        assert back == 6 * parse_format("fp32").message_bytes(numel)


def unequal(*links: float | None) -> Cluster:
    *inner, tier = CLUSTER.tiers
    members = tuple(Member(bandwidth_bytes_per_s=link, speed=1 + number / 8) for number, link in enumerate(links))
    return replace(CLUSTER, tiers=(*inner, replace(tier, members=members)))


@pytest.mark.parametrize("order", [(), (1, 0, 2), (2, 1, 0)])
def test_each_boundary_is_priced_by_its_slower_end(order: tuple[int, ...]) -> None:
    rates = (1e6, None, 3e8)
    cluster = unequal(*rates)
    plan: Plan = replace(PIPED, order=order, stages=(2, 3, 3))
    programs = build_stages(cluster, plan, BLOCKS, 6, 16)
    costs = stage_costs(programs, [1e6] * len(BLOCKS))
    tier = cluster.tiers[-1]
    placed = [rates[member] or tier.bandwidth_bytes_per_s for member in order or (0, 1, 2)]
    for stage, peer in ((0, 1), (1, 0), (1, 2), (2, 1)):
        block = sum(plan.stages[: stage + 1]) - 1 if peer > stage else sum(plan.stages[:stage])
        send = Instruction(Op.SEND, block, 0, peer=peer, backward=peer < stage)
        seconds, _ = costs[stage].point_to_point(send)
        size = parse_format("fp32").message_bytes(16 * 8)
        assert seconds == pytest.approx(tier.latency_s + size / min(placed[stage], placed[peer]), rel=1e-6)
