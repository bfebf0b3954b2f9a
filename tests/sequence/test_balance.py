"""`balance = "cost"`: every token once, capacities kept, never worse than dealing out."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.sequence.assign import assign
from terrace.sequence.balanced import micro_steps
from terrace.sequence.capacity import sure_capacity
from terrace.sequence.cost import ring_tokens
from tests.support.balance import cost_on, documents, on_all_tiers, pools

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
