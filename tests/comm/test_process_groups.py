"""Process groups of ranks that are factored in two ways."""

import contextlib
import pickle
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terrace.cluster.cluster import Cluster
from terrace.comm import process_group
from terrace.comm.collectives import Collectives
from terrace.comm.groups import TierGroups
from terrace.comm.ledger import Ledger, Meter
from terrace.comm.rounding import Origin
from terrace.launch import workers
from terrace.launch.seal import Seal
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


def test_on_nccl_a_communicator_is_made_with_its_group_by_the_members_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A group split off the world's communicator would wait for ranks that are in no group of this call."""
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(dist, "new_group", lambda **options: made.append(options))
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 3)
    limit, here = timedelta(seconds=9), torch.device("cuda", 3)
    for backend in ("nccl", "gloo"):
        monkeypatch.setattr(dist, "get_backend", lambda backend=backend: backend)
        for ranks in (None, (1, 3), (3,)):
            process_group.new_group(ranks, limit)
    pair = {"ranks": [1, 3], "use_local_synchronization": True, "timeout": limit}
    alone = {**pair, "ranks": [3]}  # it sends nothing
    on_nccl = [{"timeout": limit, "device_id": here}, {**pair, "device_id": here}, alone]
    assert made == [*on_nccl, {"timeout": limit}, pair, alone]


def in_order(world: World, members: tuple[int, ...]) -> tuple[int, list[int]]:
    """The place of this rank, and all ranks gathered in the members' order, under the signature of torch 2.11."""
    make = dist.new_group

    def new_group(  # no `sort_ranks`
        ranks: list[int], timeout: timedelta, use_local_synchronization: bool, device_id: None = None
    ) -> object:
        return make(ranks=ranks, timeout=timeout, use_local_synchronization=use_local_synchronization)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "new_group", new_group)
        group = process_group.OrderedGroup.of(members, timedelta(seconds=30))
    parts = [torch.zeros(1, dtype=torch.int64) for _ in members]
    dist.all_gather(parts, torch.tensor([world.rank]), group=group.handle)
    return group.position, [int(parts[place]) for place in group.places]


def test_members_keep_an_order_of_their_own_on_every_torch(pool: LocalPool) -> None:
    members = (2, 0, 3, 1)
    assert pool.run(4, in_order, members) == [(members.index(rank), list(members)) for rank in range(4)]


def is_bound(world: World) -> bool:
    """Whether the world's group is bound to a device, so that torch would split groups off it."""
    assert dist.group.WORLD is not None
    return dist.group.WORLD.bound_device_id is not None


def test_the_world_of_nccl_is_bound_to_no_device(pool: LocalPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pool.run(2, is_bound) == [False, False]
    given: dict[str, Any] = {}
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: given.update(options, backend=backend))
    monkeypatch.setattr(workers, "take_device", lambda index: given.update(device=index))
    monkeypatch.setattr(workers, "open_store", lambda *_: dist.HashStore())  # type: ignore[attr-defined]
    payload = pickle.dumps((str, ()))
    job = workers.PoolJob(1, 1, 2, 1, 5.0, "nccl", Seal.fresh(), payload, first_device=2)
    with contextlib.suppress(TypeError):  # `str` of a world alone
        workers._run(job, 0, lambda report: None)
    assert (given["backend"], given["device"]) == ("nccl", 3)
    assert "device_id" not in given
