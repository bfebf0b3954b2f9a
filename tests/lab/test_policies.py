"""What policies cost: the model against spreads that are built, and against figures worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.lab.policies.costs import POLICIES, policy_costs
from terrace.plan.context import ContextGroup, Heads
from terrace.plan.wire import FORMATS
from terrace.sequence.balanced import balanced_group_layout
from terrace.sequence.build import build_token_layout
from terrace.sequence.capacity import ring_rank_capacity
from terrace.sequence.cost import crossings
from terrace.sequence.distributions import PUBLISHED, batches, sample
from terrace.sequence.group_layout import GroupLayout
from terrace.sequence.segments import Segment
from terrace.sequence.traffic import sent_bytes
from tests.support.balance import cost_on


@given(
    st.sampled_from([(4,), (2, 2), (1, 3), (2, 1, 2)]),
    st.lists(st.one_of(st.integers(1, 200), st.integers(1, 4000)), min_size=1, max_size=12),
)
@settings(max_examples=40, deadline=None)
def test_bytes_are_those_of_the_spreads_that_are_built(degrees: tuple[int, ...], lengths: list[int]) -> None:
    """`cost_on` is a model of 32 heads of 64 elements in fp32, 8 of them of keys and values."""
    num_ring_ranks, cost = math.prod(degrees), cost_on(len(degrees))
    num_local_tokens = -(-sum(lengths) // num_ring_ranks)
    layout = balanced_group_layout(lengths, degrees, 1, num_local_tokens, cost)
    by_cost = policy_costs(lengths, degrees, cost, ring_rank_capacity(lengths, num_ring_ranks, num_local_tokens))[-1]
    assert sent_of(layout, degrees) == list(by_cost.sent_bytes)


def sent_of(layout: GroupLayout, degrees: tuple[int, ...]) -> list[float]:
    num_ring_ranks = math.prod(degrees)
    pool = ContextGroup(tuple(range(num_ring_ranks)), 1, degrees, degrees)
    total = [0.0] * len(degrees)
    for member in range(num_ring_ranks):
        sent = sent_bytes(build_token_layout(layout, member), pool, Heads(32, 8, 64), FORMATS["fp32"])
        total = [sum(each) for each in zip(total, sent.forward, sent.backward, strict=True)]
    return total


@pytest.mark.parametrize("degrees", [(4,), (2, 3), (2, 2, 2)])
def test_a_tiered_ring_sends_what_the_spread_of_a_ring_over_all_places_does(degrees: tuple[int, ...]) -> None:
    num_ring_ranks, cost = math.prod(degrees), cost_on(len(degrees))
    length = 2 * num_ring_ranks * 40
    segment = Segment(0, length, tuple(range(num_ring_ranks)), degrees)
    held = tuple(segment.shard(ring_rank) for ring_rank in range(num_ring_ranks))
    layout = GroupLayout(
        segments=(segment,), documents=(), local_runs=held, ulysses=1, num_local_tokens=length // num_ring_ranks
    )
    costs = {each.policy: each for each in policy_costs([length], degrees, cost, length)}
    assert list(costs["tiered ring"].sent_bytes) == sent_of(layout, degrees)
    assert max(costs["tiered ring"].attention_s) == pytest.approx(cost.ring_s(length, degrees))
    assert sum(costs["even ring"].sent_bytes) == sum(costs["tiered ring"].sent_bytes)  # but over other tiers
    assert max(costs["even ring"].attention_s) >= max(costs["tiered ring"].attention_s)
    assert sum(crossings(degrees)) == num_ring_ranks - 1


def test_packing_with_equal_tokens_is_as_slow_as_the_longest_document() -> None:
    cost = cost_on(2)
    tokens, even, tiered, by_cost = policy_costs([4000, *[1000] * 12], (2, 2), cost, 8000)
    assert [each.policy for each in (tokens, even, tiered, by_cost)] == list(POLICIES)
    assert max(tokens.attention_s) == cost.whole_s(4000)
    assert tokens.imbalance == pytest.approx(16 / ((16 + 12) / 4))
    assert by_cost.imbalance < 1.2 < tokens.imbalance
    assert all(each.bound_s <= max(each.attention_s) for each in (tokens, even, tiered, by_cost))
    assert max(by_cost.attention_s) < min(max(each.attention_s) for each in (tokens, even, tiered))


def test_sampled_lengths_have_the_published_shape() -> None:
    total = sum(count for *_, count in PUBLISHED)
    lengths = sample(10000)
    for shortest, longest, count in PUBLISHED:
        here = sum(shortest <= length <= longest for length in lengths)
        assert abs(here - 10000 * count / total) <= 1
    first, second = batches(5000, 2, lengths)
    assert sum(first) == sum(second) == 5000
    assert first != second
