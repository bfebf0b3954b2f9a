"""Slices dealt to ranks: HybridFlow's formulas to the element, the least that can be received, neighbours."""

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import combinations
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.plan.plan import Plan
from terrace.rl.hand_over.dealing import deal
from terrace.rl.hand_over.transition import Transition
from tests.support.hand_overs import Counted, mlp, transition_of
from tests.support.toys import cluster_of

Counts = tuple[int, int, int]  # pipeline, tensor and data ranks


def divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


PAPER = [
    ((stages, tensor, world // (stages * tensor)), rows)
    for world in range(1, 9)
    for stages in divisors(world)
    for tensor in divisors(world // stages)
    for rows in divisors(tensor)
]


def of_paper(counts: Counts, rows: int) -> Transition:
    stages, tensor, data = counts
    plan = Plan(
        params="device",
        grads="device",
        optimizer="device",
        mapping={"package": {"data": data, "tensor": tensor, "pipeline": stages}},
    )
    return transition_of(cluster_of(prod(counts)), plan, [mlp(2 * tensor)] * stages, rows)


def check_paper(transition: Transition, counts: Counts, rows: int) -> None:
    """Elements that every rank receives, holds at the most, and keeps beside its slice, as in HybridFlow's table 2."""
    stages, tensor, _ = counts
    found, ranks = Counted(transition), stages * tensor
    model = len(set().union(*found.owned))
    for own, need, count in zip(found.owned, found.needed, found.num_received, strict=True):
        assert len(own - need) == 0, "redundant"
        assert len(own | need) == Fraction(model, rows)
        assert count == Fraction(ranks - rows, rows * ranks) * model


@pytest.mark.parametrize(("counts", "rows"), PAPER)
def test_tensor_and_pipeline_ranks_receive_what_hybridflow_says(counts: Counts, rows: int) -> None:
    check_paper(of_paper(counts, rows), counts, rows)


@pytest.mark.parametrize(("counts", "rows"), PAPER)
def test_neighbours_as_a_replica_keep_what_they_do_not_need(counts: Counts, rows: int) -> None:
    neighbours = tuple(tuple(range(first, first + rows)) for first in range(0, prod(counts), rows))
    transition = replace(of_paper(counts, rows), replicas=neighbours)
    # Rank tp has slice tp % rows, which contains its parameters where tp // (t / rows) is the same.
    if rows in (1, counts[1]):
        check_paper(transition, counts, rows)
    else:
        with pytest.raises(AssertionError, match="redundant"):
            check_paper(transition, counts, rows)


def plan_of(params: str, optimizer: str, **mapping: dict[str, int]) -> Plan:
    return Plan(params=params, grads=params, optimizer=optimizer, mapping=mapping)


SHARDED = {
    "zero3 of 4": ((4,), plan_of("package", "package")),
    "zero3 of 6": ((6,), plan_of("package", "package")),
    "zero3 of 8 on three tiers": ((2, 2, 2), plan_of("system", "system")),
    "three levels": ((2, 2, 2), plan_of("package", "system")),
    "hsdp": ((4, 2), plan_of("package", "package")),
    "zero3 inside stages": ((4, 2), plan_of("package", "package", node={"pipeline": 2})),
    "rows inside, shards outside": ((2, 4), plan_of("node", "node", package={"tensor": 2})),
    "shards inside, rows outside": ((2, 4), plan_of("package", "package", node={"tensor": 4})),
    "rows, stages and shards": ((2, 2, 2), plan_of("node", "node", package={"tensor": 2}, system={"pipeline": 2})),
}


@pytest.mark.parametrize(
    ("name", "rows"), [(name, rows) for name in SHARDED for rows in (1, 2, 3, 4) if prod(SHARDED[name][0]) % rows == 0]
)
def test_sharded_states_are_received_once_and_least(name: str, rows: int) -> None:
    tiers, plan = SHARDED[name]
    transition = transition_of(cluster_of(*tiers), plan, [mlp(12, norm=True)] * 2, rows)
    found = Counted(transition)
    lacking = [need - own for own, need in zip(found.owned, found.needed, strict=True)]
    assert found.received == lacking
    assert found.num_received == [*map(len, lacking)]
    # As much as by any dealing within the innermost units that have room for a replica.
    size = next(ranks for ranks in (prod(tiers[:count]) for count in range(1, len(tiers) + 1)) if ranks % rows == 0)
    assert all(len({rank // size for rank in replica}) == 1 for replica in transition.replicas)
    kept = [[len(own & each) for each in found.in_slices] for own in found.owned]
    most = sum(most_kept(kept[first : first + size]) for first in range(0, prod(tiers), size))
    assert sum(found.num_received) == sum(map(len, found.needed)) - most


def most_kept(kept: Sequence[Sequence[int]]) -> int:
    """The largest sum of kept[rank][slice] with equally many ranks for each slice, by trying everything."""
    room = len(kept) // len(kept[0])

    def rest(ranks: frozenset[int], index: int) -> int:
        if not ranks:
            return 0
        return max(
            sum(kept[rank][index] for rank in chosen) + rest(ranks.difference(chosen), index + 1)
            for chosen in combinations(sorted(ranks), room)
        )

    return rest(frozenset(range(len(kept))), 0)


@given(
    st.integers(1, 4).flatmap(
        lambda slices: st.lists(
            st.lists(st.integers(0, 9), min_size=slices, max_size=slices), min_size=slices, max_size=8
        ).map(lambda kept: kept[: len(kept) // slices * slices])
    )
)
def test_ranks_keep_the_most_that_any_dealing_lets_them_keep(kept: list[list[int]]) -> None:
    replicas = deal(kept, [len(kept)])
    assert sorted(rank for replica in replicas for rank in replica) == list(range(len(kept)))
    assert all(len(replica) == len(kept[0]) for replica in replicas)
    assert sum(kept[rank][index] for replica in replicas for index, rank in enumerate(replica)) == most_kept(kept)


def test_rows_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(PlanError, match="replicas of 4 tensor rows on 6 ranks: rows must divide the ranks, so use 3"):
        deal([[0] * 4] * 6, [2, 3])
