"""`balance = "cost"` is near the proven bound of the makespan, with little effort."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.cluster.presets import load_cluster
from terrace.lab.policies.costs import makespan_bound_s
from terrace.sequence.assign import Assignment, assign
from terrace.sequence.cost import WorkCost
from terrace.sequence.distributions import bimodal, one_huge, sample
from tests.support.balance import cost_on, documents, on_all_tiers, pools
from tests.support.effort import lines_run

SOME = settings(max_examples=40, deadline=None)


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
