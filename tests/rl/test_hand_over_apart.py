"""Hand-overs between two pools: every rank's program is sound, slices arrive once, and slow tiers are crossed once."""

from collections import Counter

import pytest

from terrace.cluster.cluster import Cluster
from terrace.plan.flats import block_flats
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.slices import slice_blocks
from terrace.plan.wire import FORMATS, MessageClass
from terrace.rl.hand_over.moves import crossing
from terrace.rl.hand_over.program import hand_over_programs
from terrace.rl.hand_over.transition import Apart, Transition
from terrace.rl.hand_over.verify import verify_hand_over
from terrace.rl.placement.pools import pool_cluster, side_by_side
from tests.support.hand_overs import Counted, mlp
from tests.support.toys import cluster_of

BLOCKS = [mlp(8, norm=True), mlp(12), mlp(8, norm=True), mlp(8, norm=True)]
NODES = cluster_of(2, 2, 2)
SHARDS = Plan(params="system", grads="system", optimizer="system")
STAGES = Plan(
    params="package", grads="package", optimizer="package", mapping={"node": {"pipeline": 2}}, schedule="1f1b"
)
CASES = {
    "half and half": (NODES, (4, 4), SHARDS, 1),
    "half and half, replicas of two": (NODES, (4, 4), SHARDS, 2),
    "stages": (NODES, (4, 4), STAGES, 4),
    "more that train": (cluster_of(2, 3), (4, 2), Plan(params="node", grads="node", optimizer="node"), 2),
    "fewer that train": (NODES, (2, 4, 2), Plan(params="package", grads="package", optimizer="package"), 2),
    "one to one": (cluster_of(2), (1, 1), Plan(params="device", grads="device", optimizer="device"), 1),
}


def transition_of(cluster: Cluster, sizes: tuple[int, ...], plan: Plan, rows: int) -> tuple[Transition, range, range]:
    """The hand-over from the first pool to the second, and the ranks of both."""
    firsts = side_by_side(cluster, sizes)
    source, target = pool_cluster(cluster, sizes[0]), pool_cluster(cluster, sizes[1])
    apart = Apart(cluster=cluster, source=firsts[0], first=firsts[1], target=target)
    mesh = Mesh.of(source, plan)
    num_stages = mesh.total("pipeline")
    held = [range(stage, len(BLOCKS), num_stages) for stage in range(num_stages)]
    flats = block_flats(source, plan, slice_blocks(BLOCKS, mesh))
    made = Transition.of(source, plan, BLOCKS, flats, held, rows, apart=apart)
    return made, range(firsts[0], firsts[0] + sizes[0]), range(firsts[1], firsts[1] + sizes[1])


@pytest.mark.parametrize("name", CASES)
def test_slices_arrive_once_and_by_the_fewest_bytes(name: str) -> None:
    cluster, sizes, plan, rows = CASES[name]
    transition, source, target = transition_of(cluster, sizes, plan, rows)
    assert {rank for replica in transition.replicas for rank in replica} == set(target)
    assert all(len(replica) == rows for replica in transition.replicas)
    total = Counter[str]()
    for program in hand_over_programs(cluster, transition):
        verify_hand_over(program)
        for (message, tier), num_bytes in program.sent_bytes.items():
            assert message is MessageClass.RESHARD
            assert program.rank in (*source, *target)
            total[tier] += num_bytes
    counted = Counted(transition)
    for rank in range(cluster.world_size):
        wanted = counted.needed[rank]
        assert bool(wanted) == (rank in target)
        assert counted.received[rank] == wanted, "nobody in the pool holds anything before"
        assert counted.num_received[rank] == len(wanted), "and nothing comes twice"
    # The closed formula counts by cells, not by moves.
    crossed = [crossing(transition.cells[first], transition.tiers) for first in transition.alike]
    item = FORMATS[plan.compute].element_bytes
    by_tier = [item * sum(each) for each in zip(*crossed, strict=True)]
    assert total == Counter({tier.name: size for tier, size in zip(cluster.tiers, by_tier, strict=True) if size})


def test_a_slow_tier_between_pools_is_crossed_once() -> None:
    """Four replicas of a rank each, in the other half: the model crosses the outermost tier once, not four times."""
    transition, _, target = transition_of(*CASES["half and half"])
    elements = sum(param.numel for block in BLOCKS for param in block.params)
    by_block = [crossing(transition.cells[first], transition.tiers) for first in transition.alike]
    crossed = [sum(each) for each in zip(*by_block, strict=True)]
    assert crossed[-1] == elements
    assert sum(crossed) == elements * len(target)
