"""A second factoring of the ranks for experts: who holds which of them, and their exchanges."""

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from terrace.base.boxes import cut, overlap, shifted
from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.model.params import ParamSpec
from terrace.model.spec import BlockSpec
from terrace.plan.flats import FlatParamSpec, block_flats
from terrace.plan.mesh import STAGE, Mesh
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.plan.validate import validate
from terrace.plan.wire import MessageClass
from tests.support.planner_cases import sized

CLUSTER = sized("frontier", 2, 3, 2)
EXPERTS, INNER, HIDDEN = 6, 4, 5
EXPERT_DIMS = (("experts", EXPERTS), ("expert_intermediate", INNER), ("hidden", HIDDEN))
BLOCK = BlockSpec(
    name="moe",
    params=(
        ParamSpec(name="router", shape=(EXPERTS, HIDDEN), dims=(("choices", EXPERTS), ("hidden", HIDDEN))),
        ParamSpec(name="experts", shape=(EXPERTS, INNER, HIDDEN), dims=EXPERT_DIMS),
    ),
)


def plan_of(state: str, experts: dict[str, dict[str, int]], **mapping: dict[str, Any]) -> Plan:
    return Plan(params=state, grads=state, optimizer=state, experts=experts, mapping=mapping)


PLANS = {
    "inside": plan_of("system", {"package": {"expert": 2}}),
    "middle": plan_of("node", {"node": {"expert": 3}}),
    "all": plan_of("system", {"package": {"rows": 2}, "node": {"expert": 3}, "system": {"expert": 2}}),
    "two tiers": plan_of("node", {"package": {"expert": 2}, "node": {"expert": 3}}),
    # Attention is spread in another way than experts.
    "ring": plan_of("system", {"node": {"expert": 3}}, package={"context": {"ring": 2}}, system={"data": 2}),
    "stages": plan_of("node", {"package": {"rows": 2}, "node": {"expert": 3}}, system={"pipeline": 2}),
    # Ranks that share attention's matrices hold different experts, or parts of the same.
    "tensor rows": plan_of("system", {"package": {"expert": 2}, "node": {"expert": 3}}, node={"tensor": 3}),
    "both rows": plan_of("node", {"package": {"rows": 2}}, package={"tensor": 2}),
    "beside stages": plan_of("system", {"package": {"expert": 2}, "system": {"rows": 2}}, node={"pipeline": 3}),
}


def sliced(plan: Plan, cluster: Cluster = CLUSTER) -> tuple[BlockSpec, Mesh]:
    mesh = Mesh.of(cluster, plan)
    (block,) = slice_blocks([BLOCK], mesh)
    return block, mesh


def flats_of(plan: Plan) -> dict[str, FlatParamSpec]:
    return {flat.params[0].name: flat for flat in block_flats(CLUSTER, plan, [sliced(plan)[0]])[0]}


@pytest.mark.parametrize("name", PLANS)
def test_experts_have_fewer_holders(name: str) -> None:
    plan = PLANS[name]
    block, mesh = sliced(plan)
    router, experts = block.params
    assert mesh.divides_stacks
    stage = CLUSTER.world_size // mesh.total("pipeline")
    degree, rows = mesh.stacks.total("expert"), mesh.stacks.total("rows")
    assert router.shape == (EXPERTS, HIDDEN)
    assert experts.shape == (EXPERTS // degree, INNER // rows, HIDDEN)
    held = Counter(
        element
        for rank in range(CLUSTER.world_size)
        for element in product(*(range(part.start, part.stop) for part in rank_slices(experts, mesh, rank)))
    )
    copies = CLUSTER.world_size // (degree * rows)
    assert held == dict.fromkeys(product(range(EXPERTS), range(INNER), range(HIDDEN)), copies)
    flats = flats_of(plan)
    assert flats["router"].layout.degree == stage
    assert flats["experts"].layout.degree == stage // (degree * rows)
    for rank in range(CLUSTER.world_size):
        assert mesh.stage(rank) == mesh.stacks.stage(rank)
        peers = {peer for tier in range(3) for peer in flats["experts"].layout.peers(rank, tier)}
        assert all(rank_slices(experts, mesh, peer) == rank_slices(experts, mesh, rank) for peer in peers)
        assert set(mesh.stacks.members(rank, STAGE)) == set(mesh.members(rank, STAGE))


def test_without_a_table_tensor_rows_hold_all_experts() -> None:
    plan = plan_of("system", {}, node={"tensor": 3})
    block, mesh = sliced(plan)
    for param, whole in zip(block.params, BLOCK.params, strict=True):
        assert param.shape == whole.shape
        assert param.replicated_over is not None
        assert "rows" in param.replicated_over
        assert rank_slices(param, mesh, 5) == tuple(slice(0, size) for size in whole.shape)
    # Every row has a part of both gradients.
    assert [flat.layout.degree for flat in flats_of(plan).values()] == [CLUSTER.world_size]


def test_a_unit_of_a_tier_holds_neighbours() -> None:
    """Experts are shared out from the outermost tier inward."""
    plan = plan_of("system", {"package": {"expert": 2}, "node": {"expert": 3}})
    block, mesh = sliced(plan)
    firsts = [rank_slices(block.params[1], mesh, rank)[0].start for rank in range(6)]
    assert firsts == [0, 1, 2, 3, 4, 5]
    plan = plan_of("system", {"package": {"expert": 2}, "system": {"expert": 3}})
    cluster = sized("frontier", 2, 2, 3)
    block, mesh = sliced(plan, cluster)
    firsts = [rank_slices(block.params[1], mesh, rank)[0].start for rank in range(12)]
    assert firsts == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]


@pytest.mark.parametrize("name", PLANS)
def test_they_are_gathered_and_reduced_among_their_holders_alone(name: str) -> None:
    """A gather and a reduction over n ranks in turn each send (n - 1) / n of the buffer."""
    plan = PLANS[name]
    for flat in flats_of(plan).values():
        span = flat.layout.span(flat.layout.params)
        shares = flat.padded - flat.padded // span
        for message, item in ((MessageClass.GATHER, 4), (MessageClass.REDUCE, 4)):
            hops = [hop for way in block_hops(flat.layout, plan, message, flat.padded) for hop in way]
            assert sum(hop.sent_bytes for hop in hops) == shares * item
            assert {hop.tier for hop in hops} <= {tier for tier in range(3) if flat.layout.degrees[tier] > 1}


@pytest.mark.parametrize("name", PLANS)
def test_boxes_of_the_first_holders_are_every_element_once(name: str) -> None:
    plan = PLANS[name]
    mesh = Mesh.of(CLUSTER, plan)
    first_stage = [rank for rank in range(CLUSTER.world_size) if mesh.stage(rank) == 0]
    for flat in flats_of(plan).values():
        (param,) = flat.params
        whole = param.whole or param.shape
        seen: Counter[tuple[int, ...]] = Counter()
        for rank in first_stage:
            places = flat.layout.coordinates(rank)
            if any(places[flat.layout.optimizer + 1 :]):
                continue  # another rank holds the same
            part = rank_slices(param, mesh, rank)
            held = flat.layout.slice(flat.layout.optimizer, places, flat.padded)
            for box in cut(param.shape, held.start, min(held.stop, param.numel)):
                clipped = overlap(box, tuple((0, each.stop - each.start) for each in part))
                assert clipped is not None
                box = shifted(clipped, [each.start for each in part])
                seen.update(product(*(range(start, stop) for start, stop in box)))
        assert seen == dict.fromkeys(product(*map(range, whole)), 1)


@pytest.mark.parametrize(
    ("experts", "said"),
    [
        ({"rack": {"expert": 2}}, "experts names tier 'rack', which is not in the cluster"),
        ({"node": {"experts": 3}}, "experts.node names axis 'experts'; did you mean 'expert'"),
        ({"node": {"expert": 0}}, "experts.node.expert = 0: a degree is at least 1"),
        ({"node": {"expert": 2}}, "experts.node multiply to 2, which does not divide the 3 ranks of a stage"),
        ({"node": {"expert": 3, "rows": 3}}, "experts.node multiply to 9"),
        (
            {"package": {"expert": 2}, "system": {"expert": 2}},
            "expert in the table experts multiply to 4, which does not divide the 6 experts of moe",
        ),
        (
            {"node": {"rows": 3}},
            "multiply to 3, which does not divide the 4 elements of an expert's inner size of moe",
        ),
    ],
)
def test_tables_that_fit_nothing(experts: dict[str, dict[str, int]], said: str) -> None:
    def check() -> None:
        plan = plan_of("system", experts)
        validate(CLUSTER, plan, [BLOCK])
        sliced(plan)

    with pytest.raises(PlanError, match=said):
        check()


@pytest.mark.parametrize(
    ("message", "tier", "wire", "said"),
    [
        ("dispatch", "node", "fp8", "wire.dispatch.node has no effect: the table experts has no ranks on 'node'"),
        ("combine", "node", "bf16", "wire.combine.node has no effect: the table experts has no ranks on 'node'"),
        (
            "dispatch",
            "package",
            "fp8+feedback",
            "error feedback is for gradients and for changes of islands, and dispatch carries activations",
        ),
        ("combine", "package", "fp64", "is wider than the fp32 values it would carry"),
        ("dispatch", "rack", "fp8", "wire.dispatch names tier 'rack', which is not in the cluster"),
        ("route", "package", "fp8", "wire names message class 'route'"),
        ("dispatch", "package", "int8", None),
        ("combine", "system", "fp8:32", None),
    ],
)
def test_formats_of_rows(message: str, tier: str, wire: str, said: str | None) -> None:
    experts = {"package": {"expert": 2}, "system": {"rows": 2}}
    plan = replace(plan_of("system", experts), wire={message: {tier: wire}})
    if said is None:
        validate(CLUSTER, plan, [BLOCK])
        return
    with pytest.raises(PlanError, match=said):
        validate(CLUSTER, plan, [BLOCK])


@pytest.mark.parametrize(
    ("experts", "chunks", "said"),
    [
        ({}, {"forward": 2}, "expert_chunks has no effect: every rank has all experts"),
        ({"package": {"expert": 2}}, {"forward": 0}, "expert_chunks.forward = 0: tokens travel in 1 to 64 chunks"),
        ({"package": {"expert": 2}}, {"backwards": 2}, "expert_chunks.backwards is none of forward, backward, ahead"),
        ({"package": {"expert": 2}}, {"forward": 2, "backward": 3}, "so one number must divide the other"),
        ({"package": {"expert": 2}}, {"forward": 6, "backward": 3}, None),
        ({"package": {"expert": 2}}, {"backward": 64}, None),
        ({"package": {"expert": 2}}, {"backward": 4, "ahead": 1}, None),
        ({"package": {"expert": 2}}, {"backward": 4, "ahead": 2}, "ahead = 2 has no effect: on a way over one tier"),
        ({"package": {"rows": 2}, "node": {"expert": 3}}, {"backward": 4, "ahead": 3}, None),
        (
            {"package": {"expert": 2}, "node": {"expert": 3}},
            {"backward": 4, "ahead": 4},
            "of 4 chunks at most 3",
        ),
        ({"package": {"expert": 2}, "node": {"expert": 3}}, {"ahead": 2}, "of 1 chunks at most 1 can be ahead"),
    ],
)
def test_chunks_of_tokens(experts: dict[str, dict[str, int]], chunks: dict[str, int], said: str | None) -> None:
    plan = replace(plan_of("system", experts), expert_chunks=chunks)
    if said is None:
        validate(CLUSTER, plan, [BLOCK])
        return
    with pytest.raises(PlanError, match=said):
        validate(CLUSTER, plan, [BLOCK])


def test_what_experts_cannot_be_combined_with() -> None:
    dense = BlockSpec(name="dense", params=BLOCK.params[:1])
    with pytest.raises(PlanError, match="no layer of this model has experts"):
        validate(CLUSTER, PLANS["inside"], [dense])
    columns = plan_of("system", {}, package={"tensor": {"columns": 2}})
    with pytest.raises(PlanError, match="2 tensor columns, and"):
        validate(CLUSTER, columns, [BLOCK])
    with pytest.raises(PlanError, match="rows of the table experts cut them"):
        validate(CLUSTER, replace(PLANS["all"], update="galore:2"), [BLOCK])
    inside = replace(PLANS["all"], params="node", grads="node", optimizer="node")
    with pytest.raises(PlanError, match=r"crosses tier 'system', and outer\.tier"):
        validate(CLUSTER, replace(inside, outer=Outer(tier="system", every=2)), [BLOCK])
