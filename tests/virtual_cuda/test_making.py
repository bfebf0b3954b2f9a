"""Communicators that three ranks make in two orders: in one they meet, in the other each waits for the next."""

from collections.abc import Sequence
from datetime import timedelta

import pytest

from terrace.comm.process_group import new_group
from terrace.launch.start import LocalPool, World
from tests.support.nightly import nightly
from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.rehearsal import rehearsed
from tests.virtual_cuda.rules import Entry, faults_of

Orders = Sequence[Sequence[tuple[int, ...]]]  # groups by rank; those of one rank only count
ROUNDS: Orders = (((0, 1), (0, 2), (0,)), ((0, 1), (1,), (1, 2)), ((2,), (0, 2), (1, 2)))
RING: Orders = (((0, 1), (0,), (0, 2)), ((1, 2), (1,), (0, 1)), ((0, 2), (2,), (1, 2)))
UNCOUNTED: Orders = (((0, 1), (0, 2)), ((0, 1), (1, 2)), ((0, 2), (1, 2)))  # the second group of 0, the first of 2
LIMIT_S = 2.0  # of a group that nobody joins


def make(world: World, orders: Orders, limit_s: float) -> tuple[list[Entry], bool]:
    """Make this rank's groups. Returns its log, and whether a limit has ended it."""
    with rehearsed(limit_s=limit_s) as rehearsal:
        try:
            for members in orders[world.rank]:
                new_group(members, timedelta(seconds=60))
        except RuntimeError:
            return rehearsal.log, True
    return rehearsal.log, False


@pytest.mark.parametrize("name", ["rounds", "ring", *nightly("uncounted")])
def test_groups_that_ranks_make_in_other_orders(pool: LocalPool, name: str) -> None:
    orders, limit_s = {"rounds": (ROUNDS, 60.0), "ring": (RING, LIMIT_S), "uncounted": (UNCOUNTED, LIMIT_S)}[name]
    logs, ended = zip(*pool.run(3, make, orders, limit_s), strict=True)
    found = faults_of(logs)
    assert any(ended) == (name != "rounds")
    assert [fault.kind for fault in found] == [Kind.MAKING] * (name != "rounds")
    for fault in found:
        assert "terrace/comm/process_group.py" in fault.words
        wanted = [f"rank {rank} makes {list(orders[rank][0])} as group 1 at " for rank in range(3)]
        assert all(each in fault.words for each in (wanted if name == "ring" else ["as group 2", "as group 1"])), fault
