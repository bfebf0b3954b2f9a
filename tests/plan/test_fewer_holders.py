"""A parameter cut by an axis whose ranks hold the other parameters together has fewer holders: as experts will need."""

from collections import Counter
from itertools import product

import pytest

from terrace.checkpoint.boxes import cut, overlap, shifted
from terrace.cluster.cluster import Cluster
from terrace.model.spec import BlockSpec, ParamSpec
from terrace.plan.dims import CUT_BY
from terrace.plan.flats import block_flats
from terrace.plan.layout import Layout
from terrace.plan.mesh import HOLDERS, Mesh
from terrace.plan.plan import Plan
from terrace.plan.routes import block_hops
from terrace.plan.slices import rank_slices, slice_blocks
from terrace.plan.wire import MessageClass
from tests.support.planner_cases import sized

CLUSTER = sized("frontier", 2, 3, 2)
EXPERTS, HIDDEN = 6, 5
BLOCK = BlockSpec(
    name="moe",
    params=(
        ParamSpec(name="router", shape=(EXPERTS, HIDDEN), dims=(("choices", EXPERTS), ("hidden", HIDDEN))),
        ParamSpec(name="experts", shape=(EXPERTS, HIDDEN, 7), dims=(("experts", EXPERTS), ("a", HIDDEN), ("b", 7))),
    ),
)


def plan_of(state: str, **mapping: dict[str, int | dict[str, int]]) -> Plan:
    return Plan(params=state, grads=state, optimizer=state, mapping=mapping)


PLANS = {
    # experts over Ulysses ranks of a package, over the data ranks inside a node, over both
    "ulysses": plan_of("system", package={"context": {"ulysses": 2}}),
    "ring": plan_of("node", package={"data": 2}, node={"context": {"ring": 3}}, system={"data": 2}),
    "data": plan_of("system", package={"context": {"ring": 2}}, node={"data": 3}, system={"context": {"ring": 2}}),
}


def sliced(axis: str, plan: Plan, cluster: Cluster = CLUSTER) -> tuple[BlockSpec, Mesh]:
    mesh = Mesh.of(cluster, plan)
    (block,) = slice_blocks([BLOCK], mesh, {**CUT_BY, "experts": (axis,)})
    return block, mesh


@pytest.mark.parametrize("axis", PLANS)
def test_an_axis_of_the_data_ranks_cuts_experts_and_leaves_them_fewer_holders(axis: str) -> None:
    block, mesh = sliced(axis, PLANS[axis])
    router, experts = block.params
    degree, world = mesh.total(axis), CLUSTER.world_size
    assert router.shape == (EXPERTS, HIDDEN)
    assert router.is_replicated_over(axis)
    assert experts.shape == (EXPERTS // degree, HIDDEN, 7)
    assert not experts.is_replicated_over(axis)
    held = Counter(expert for rank in range(world) for expert in range(EXPERTS)[rank_slices(experts, mesh, rank)[0]])
    assert held == dict.fromkeys(range(EXPERTS), world // degree)
    flats = {flat.params[0].name: flat for flat in block_flats(CLUSTER, PLANS[axis], [block])[0]}
    assert flats["router"].layout.degree == world
    assert flats["experts"].layout.degree == world // degree
    assert flats["experts"].layout == Layout.of(CLUSTER, PLANS[axis], [name for name in HOLDERS if name != axis])
    for rank in range(world):
        peers = {peer for tier in range(3) for peer in flats["experts"].layout.peers(rank, tier)}
        assert all(rank_slices(experts, mesh, peer) == rank_slices(experts, mesh, rank) for peer in peers)


@pytest.mark.parametrize("axis", PLANS)
def test_experts_are_gathered_and_reduced_among_their_holders_alone(axis: str) -> None:
    """A gather and a reduction over n ranks in turn each send (n - 1) / n of the buffer."""
    plan = PLANS[axis]
    block, _ = sliced(axis, plan)
    for flat in block_flats(CLUSTER, plan, [block])[0]:
        span = flat.layout.span(flat.layout.params)
        shares = flat.padded - flat.padded // span
        for message, item in ((MessageClass.GATHER, 4), (MessageClass.REDUCE, 4)):
            hops = [hop for way in block_hops(flat.layout, plan, message, flat.padded) for hop in way]
            assert sum(hop.sent_bytes for hop in hops) == shares * item
            assert {hop.tier for hop in hops} <= {tier for tier in range(3) if flat.layout.degrees[tier] > 1}


@pytest.mark.parametrize("axis", PLANS)
def test_boxes_of_the_first_holders_are_every_element_once(axis: str) -> None:
    plan = PLANS[axis]
    block, mesh = sliced(axis, plan)
    for flat in block_flats(CLUSTER, plan, [block])[0]:
        (param,) = flat.params
        whole = param.whole or param.shape
        seen: Counter[tuple[int, ...]] = Counter()
        for rank in range(CLUSTER.world_size):
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
