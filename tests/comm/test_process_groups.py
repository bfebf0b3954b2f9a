"""Process groups of ranks that are factored in two ways."""

from datetime import timedelta

import torch

from terrace.cluster.cluster import Cluster
from terrace.comm.collectives import Collectives
from terrace.comm.groups import TierGroups
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.rounding import Origin
from terrace.launch.start import LocalPool, World
from terrace.plan.layout import Layout
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.program.resolve import flat_transfer
from tests.support.toys import cluster_of

PLAN = Plan(params="package", grads="package", optimizer="package", compute="fp64", master="fp64")
FACTORINGS = (Mesh.build(1, data=(4,)), Mesh.build(1, rows=(2,), data=(2,)), Mesh.build(1, ring=(2,), data=(2,)))


def reduced(world: World, cluster: Cluster) -> list[tuple[tuple[int, ...], list[float]]]:
    """Peers, and the part of the sum of all peers' numbers, of buffers that are factored in several ways."""
    layouts = [Layout.of(cluster, PLAN, ("data",), mesh) for mesh in FACTORINGS]
    transfers = [flat_transfer(MessageClass.REDUCE, 0, layout, PLAN, 4) for layout in layouts]
    groups = TierGroups(transfers, world.rank, timedelta(seconds=30))
    collectives = Collectives(groups, layouts[0], PLAN, Ledger(), Meter(), torch.device("cpu"))
    found = []
    for transfer in transfers:
        numbers = torch.arange(4, dtype=torch.float64) * 10**world.rank
        part = collectives.reduce(transfer, numbers, Origin("block", torch.device("cpu"), Meter()))
        found.append((groups.of(0, transfer.ranks, 0).ranks, part.tolist()))
    return found


def test_buffers_of_one_lane_may_be_factored_in_two_ways(pool: LocalPool) -> None:
    """The same axis and tier, but other ranks: a group is known by the ranks that it joins."""
    one, first, second, last = pool.run(4, reduced, cluster_of(4))
    assert one == [((0, 1, 2, 3), [0.0]), ((0, 2), [0.0, 101.0]), ((0, 2), [0.0, 101.0])]
    assert first == [((0, 1, 2, 3), [1111.0]), ((1, 3), [0.0, 1010.0]), ((1, 3), [0.0, 1010.0])]
    assert second == [((0, 1, 2, 3), [2222.0]), ((0, 2), [202.0, 303.0]), ((0, 2), [202.0, 303.0])]
    assert last == [((0, 1, 2, 3), [3333.0]), ((1, 3), [2020.0, 3030.0]), ((1, 3), [2020.0, 3030.0])]
