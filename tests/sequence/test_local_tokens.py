"""Tokens held between attention: equally many, each once, as few as possible away from where they are attended to."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.plan.context import tier_between
from terrace.sequence.balanced import balanced_group_layout
from terrace.sequence.build import build_token_layout
from terrace.sequence.local_tokens import moves
from terrace.sequence.token_layout import num_rows
from tests.support.balance import cost_on, documents, pools

SOME = settings(max_examples=40, deadline=None)


@given(pools, documents, st.integers(1, 3))
@SOME
def test_every_member_holds_as_many_and_the_spreads_of_it_are_built(
    degrees: tuple[int, ...], lengths: list[int], ulysses: int
) -> None:
    num_ring_ranks = math.prod(degrees)
    num_local_tokens = -(-sum(lengths) // (num_ring_ranks * ulysses))
    layout = balanced_group_layout(lengths, degrees, ulysses, num_local_tokens, cost_on(len(degrees)))
    assert len(layout.local_runs) == num_ring_ranks * ulysses
    assert max(num_rows(runs) for runs in layout.local_runs) <= num_local_tokens
    tokens = sorted(token for runs in layout.local_runs for run in runs for token in range(*run))
    assert tokens == list(range(sum(lengths)))
    ring_rank = build_token_layout(layout, 0)  # which asserts that what is held is attended to once
    assert num_rows(tuple(run for _, runs in ring_rank.into.receives for run in runs)) == ring_rank.num_attention_tokens


counts = st.integers(1, 3).flatmap(
    lambda last: st.tuples(
        st.sampled_from([(2, last), (last, 2), (1, 2, last), (2, last, 2)]), st.lists(st.integers(0, 9), min_size=12)
    )
)


@given(counts, st.integers(0, 3))
@SOME
def test_no_layout_has_fewer_tokens_cross_a_tier_from_nodes_outwards(
    case: tuple[tuple[int, ...], list[int]], spare: int
) -> None:
    degrees, numbers = case
    attended = numbers[: math.prod(degrees)]
    room = -(-sum(attended) // len(attended)) + spare
    found = moves(attended, degrees, room)
    left = list(attended)
    for source, to, number in found:
        assert number > 0
        left[source] -= number
        left[to] += number
        assert source != to
    assert max(left) <= room
    size = next((degree for degree in degrees if degree > 1), 1)
    for tier, inside in enumerate(itertools.accumulate(degrees, lambda inside, degree: inside * degree)):
        if inside < size:
            continue
        leave = sum(number for source, to, number in found if tier_between(degrees, source, to) > tier)
        units = [sum(attended[first : first + inside]) for first in range(0, len(attended), inside)]
        assert leave == sum(max(0, unit - room * inside) for unit in units)  # each has to give away as many


@given(st.lists(st.integers(0, 12), min_size=4, max_size=4), st.integers(0, 1))
@SOME
def test_a_tiny_transport_problem_is_solved_as_well_as_trying_all(attended: list[int], spare: int) -> None:
    """Two nodes of two places: of all layouts, none has fewer tokens cross between nodes."""
    room = -(-sum(attended) // 4) + spare
    found = moves(attended, (2, 2), room)
    crossed = sum(number for source, to, number in found if tier_between((2, 2), source, to))
    first = sum(attended[:2])  # what the first node attends to
    ways = itertools.product(range(room + 1), repeat=4)  # how many tokens each place holds
    assert crossed == min(abs(first - sum(held[:2])) for held in ways if sum(held) == sum(attended))


def test_what_leaves_a_node_leaves_by_all_its_places() -> None:
    assert moves([8, 0, 0, 0], (2, 2), 2) == ((0, 1, 2), (0, 2, 2), (0, 3, 2))  # the other has nothing of its own
    attended = [20, 4, 4, 4, 0, 0, 0, 0]
    leaving = dict.fromkeys(range(4), 0)
    entering = dict.fromkeys(range(4, 8), 0)
    for source, to, number in moves(attended, (4, 2), 4):
        if source < 4 <= to:
            leaving[source] += number
            entering[to] += number
    assert set(leaving.values()) == {4}
    assert set(entering.values()) == {4}


def test_more_tokens_than_rows_are_refused() -> None:
    with pytest.raises(PlanError, match="9 tokens do not fit on 2 ring ranks that hold 4 each"):
        moves([5, 4], (2,), 4)
    with pytest.raises(PlanError, match="9 tokens do not fit on 4 ranks that hold 2 each"):
        balanced_group_layout([5, 4], (2,), 2, 2, cost_on(1))
    assert balanced_group_layout([], (2,), 2, 2, cost_on(1)).local_runs == ((), (), (), ())  # every row was padding
