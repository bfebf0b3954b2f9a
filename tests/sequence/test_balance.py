"""`balance = "cost"`: every token once, capacities kept, near the bound, never worse than dealing out."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.cluster.presets import load_cluster
from terrace.sequence.assign import Assignment, assign
from terrace.sequence.bound import makespan_bound_s
from terrace.sequence.capacity import sure_capacity
from terrace.sequence.cost import WorkCost, ring_tokens
from terrace.sequence.distributions import bimodal, one_huge, sample
from terrace.sequence.micro import micro_steps
from tests.support.balance import cost_on, documents, pools
from tests.support.effort import lines_run

SOME = settings(max_examples=40, deadline=None)


@given(pools, documents, st.sampled_from([0, 64, 1000]), st.sampled_from([1e9, 1e11, 1e14]))
@SOME
def test_every_token_once_within_capacity_and_never_worse_than_dealing_out(
    degrees: tuple[int, ...], lengths: list[int], window: int, rate: float
) -> None:
    num_ring_ranks, cost = math.prod(degrees), cost_on(len(degrees), rate=rate, window=window)
    capacity = sure_capacity(lengths, num_ring_ranks)
    found = assign(lengths, degrees, cost, capacity)
    assert found == assign(lengths, degrees, cost, capacity)
    seconds, tokens, start = [0.0] * num_ring_ranks, [0] * num_ring_ranks, 0
    for segment, length in zip(found.segments, lengths, strict=True):
        assert (segment.start, segment.stop) == (start, start + length)
        assert len(set(segment.ring_ranks)) == len(segment.ring_ranks) == math.prod(segment.shape)
        places_of_a_ring_are_whole_units(segment.ring_ranks, segment.shape, degrees)
        start += length
        shape = on_all_tiers(segment.ring_ranks, degrees)
        for ring_rank in segment.ring_ranks:
            seconds[ring_rank] += cost.ring_s(length, shape)
            tokens[ring_rank] += ring_tokens(length, len(segment.ring_ranks))
    assert found.seconds == pytest.approx(seconds)
    assert found.tokens == tuple(tokens)
    assert max(tokens) <= capacity
    dealt = [0.0] * num_ring_ranks
    for index, length in enumerate(lengths):
        dealt[index % num_ring_ranks] += cost.whole_s(length)
    fits = max(sum(lengths[ring_rank::num_ring_ranks]) for ring_rank in range(num_ring_ranks)) <= capacity
    assert not fits or found.makespan_s <= max(dealt) * (1 + 1e-12)


def on_all_tiers(ring_ranks: tuple[int, ...], degrees: tuple[int, ...]) -> tuple[int, ...]:
    """How many members a group has on each tier, which is how far its places differ there."""
    found = []
    for degree in degrees:
        found.append(len({ring_rank % degree for ring_rank in ring_ranks}))
        ring_ranks = tuple(sorted({ring_rank // degree for ring_rank in ring_ranks}))
    return tuple(found)


def places_of_a_ring_are_whole_units(
    ring_ranks: tuple[int, ...], shape: tuple[int, ...], degrees: tuple[int, ...]
) -> None:
    """A group is one place, or some of a unit's children, whole; in the order of a segment, the innermost fastest."""
    wanted = on_all_tiers(ring_ranks, degrees)
    assert math.prod(wanted) == len(ring_ranks)
    assert shape == (tuple(degree for degree in wanted if degree > 1) or (1,))
    assert list(ring_ranks) == sorted(ring_ranks)
    crossed = [tier for tier, degree in enumerate(wanted) if degree > 1]
    assert all(wanted[tier] == degrees[tier] for tier in range(crossed[-1] if crossed else 0))


def test_a_document_that_no_place_has_room_for_is_refused() -> None:
    with pytest.raises(
        PlanError, match=r"100 tokens, the longest document 100, do not fit on 4 ring ranks of 10 tokens"
    ):
        assign([100], (2, 2), cost_on(2), 10)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(1, 4))
@SOME
def test_rows_are_dealt_to_micro_steps_in_equal_numbers(few: list[float], num_micros: int) -> None:
    costs = few * num_micros
    steps = micro_steps(costs, num_micros)
    assert sorted(row for rows in steps for row in rows) == list(range(len(costs)))
    assert {len(rows) for rows in steps} == {len(few)}
    totals = [sum(costs[row] for row in rows) for rows in steps]
    assert max(totals) - min(totals) <= max(costs) * (1 + 1e-9)


@given(pools, documents, st.sampled_from([1e9, 1e11]))
@SOME
def test_no_assignment_is_below_the_bound(degrees: tuple[int, ...], lengths: list[int], rate: float) -> None:
    cost, capacity = cost_on(len(degrees), rate=rate), sum(lengths) + 1
    found = assign(lengths, degrees, cost, capacity)
    assert makespan_bound_s(lengths, degrees, cost, capacity) <= found.makespan_s * (1 + 1e-9)


@given(st.lists(st.integers(1, 3000), min_size=1, max_size=3), st.sampled_from([(2,), (3,), (2, 2), (1, 2)]))
@SOME
def test_the_bound_is_below_the_best_of_all_assignments(lengths: list[int], degrees: tuple[int, ...]) -> None:
    cost, capacity = cost_on(len(degrees), pair_s=1e-8), sum(lengths) + 1
    best, found = best_of_all(lengths, degrees, cost), assign(lengths, degrees, cost, capacity)
    assert makespan_bound_s(lengths, degrees, cost, capacity) <= best * (1 + 1e-9)
    assert best <= found.makespan_s * (1 + 1e-9) <= 2 * best * (1 + 1e-9)


def best_of_all(lengths: list[int], degrees: tuple[int, ...], cost: WorkCost) -> float:
    """The least makespan over every group of places of every sequence."""
    num_ring_ranks = math.prod(degrees)
    rings: list[tuple[int, ...]] = []
    for ring_ranks in itertools.chain.from_iterable(
        itertools.combinations(range(num_ring_ranks), number) for number in range(1, num_ring_ranks + 1)
    ):
        wanted = on_all_tiers(ring_ranks, degrees)
        crossed = [tier for tier, degree in enumerate(wanted) if degree > 1]
        whole = all(wanted[tier] == degrees[tier] for tier in range(crossed[-1] if crossed else 0))
        if whole and math.prod(wanted) == len(ring_ranks):
            rings.append(ring_ranks)
    best = math.inf
    for chosen in itertools.product(rings, repeat=len(lengths)):
        seconds = [0.0] * num_ring_ranks
        for length, ring_ranks in zip(lengths, chosen, strict=True):
            for ring_rank in ring_ranks:
                seconds[ring_rank] += cost.ring_s(length, on_all_tiers(ring_ranks, degrees))
        best = min(best, max(seconds))
    return best


def gpus(num_gpus: int) -> tuple[tuple[int, ...], WorkCost]:
    """Nodes of eight, and a layer of 32 heads of 128 elements, 8 of keys and values."""
    cluster = load_cluster("dgx-h100").resized(num_gpus // 8)
    return (8, num_gpus // 8), WorkCost.of(cluster, heads=32, kv_heads=8, head_dim=128)


@pytest.mark.parametrize("num_gpus", [8, 32, 128])
@pytest.mark.parametrize("name", ["published", "bimodal", "one huge"])
def test_the_makespan_is_within_five_percent_of_the_bound(name: str, num_gpus: int) -> None:
    number = 16 * num_gpus
    cases = {
        "published": sample(number),
        "bimodal": bimodal(number),
        "one huge": one_huge(number, 256 * number),
    }
    lengths, (degrees, cost) = cases[name], gpus(num_gpus)
    capacity = 2 * -(-sum(lengths) // num_gpus)
    found = assign(lengths, degrees, cost, capacity)
    assert found.makespan_s <= 1.05 * makespan_bound_s(lengths, degrees, cost, capacity)


def test_thousands_of_documents_are_assigned_to_a_thousand_places_with_little_effort() -> None:
    """A few hundred lines of Python a document; `python -m bench.assign` measures the seconds."""
    lengths, (degrees, cost) = sample(4096), gpus(1024)
    capacity = 2 * -(-sum(lengths) // 1024)
    effort = lines_run(lambda: assign(lengths, degrees, cost, capacity))
    assert isinstance(assign(lengths, degrees, cost, capacity), Assignment)
    assert effort < 200 * (4096 + 1024)
