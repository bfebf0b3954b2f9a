"""Advantages against figures worked out by hand, and against loops over tokens."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.rl.algorithms.advantages import (
    dr_grpo,
    gae,
    grpo,
    is_degenerate,
    overlong_penalty,
    reinforce_pp,
    reinforce_pp_baseline,
    remax,
    rewards_to_go,
    rloo,
    whiten,
)
from terrace.rl.values.ragged import Ragged

EXACT = 1e-12
FLOATS = st.floats(-2, 2, width=16)


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def ragged(*rows: Sequence[float]) -> Ragged:
    return Ragged.of([numbers(*row) for row in rows])


def near(found: Tensor, *expected: float, tolerance: float = EXACT) -> bool:
    return found.tolist() == pytest.approx(list(expected), rel=tolerance, abs=tolerance)


def test_gae_by_hand() -> None:
    # gamma .9, lambda .8. From the end: delta = 1 - .6, .9 x .6 - .4, .9 x .4 - .5; A = delta + .72 A of the next.
    advantages, returns = gae(ragged([0, 0, 1]), ragged([0.5, 0.4, 0.6]), gamma=0.9, lam=0.8)
    assert near(advantages.values, -0.14 + 0.72 * 0.428, 0.14 + 0.72 * 0.4, 0.4)
    assert near(returns.values, 0.66816, 0.828, 1.0)


def test_gae_adds_no_value_behind_the_last_token_of_a_row() -> None:
    # A response that was cut ends as one with an end of sequence does, and an empty one gives nothing.
    rewards, values = ragged([1], [], [0, 2], [3]), ragged([5], [], [7, 1], [9])
    advantages, returns = gae(rewards, values, gamma=1.0, lam=1.0)
    assert near(advantages.values, -4, 2 - 7, 2 - 1, 3 - 9)
    assert near(returns.values, 1, 2, 2, 3)


def test_gae_skips_observation_tokens_in_the_middle() -> None:
    """The masked recursion, written with the mask: V and A carry across tokens that the policy did not choose."""
    rewards, values = [0.1, 9.0, 9.0, -0.2, 9.0, 1.0], [0.5, 8.0, 7.0, 0.4, 6.0, 0.6]
    mask, gamma, lam = [True, False, False, True, False, True], 0.9, 0.8
    expected, next_value, next_advantage = [0.0] * 6, 0.0, 0.0
    for token in range(5, -1, -1):
        if mask[token]:
            delta = rewards[token] + gamma * next_value - values[token]
            next_value, next_advantage = values[token], delta + gamma * lam * next_advantage
            expected[token] = next_advantage

    valid = Ragged.of([torch.tensor(mask)])
    advantages, _ = gae(ragged(rewards).kept(valid), ragged(values).kept(valid), gamma=gamma, lam=lam)
    assert near(advantages.values, expected[0], expected[3], expected[5])


@settings(max_examples=40)
@given(st.lists(st.lists(st.tuples(FLOATS, FLOATS), max_size=9), min_size=1, max_size=5), st.sampled_from([0, 0.5, 1]))
def test_gae_is_the_loop_over_tokens(rows: list[list[tuple[float, float]]], lam: float) -> None:
    expected: list[float] = []
    for row in rows:
        advantages, advantage, next_value = [], 0.0, 0.0
        for reward, value in reversed(row):
            advantage = reward + 0.95 * next_value - value + 0.95 * lam * advantage
            next_value = value
            advantages.append(advantage)
        expected += reversed(advantages)
    rewards, values = (ragged(*([pair[part] for pair in row] for row in rows)) for part in (0, 1))
    assert near(gae(rewards, values, gamma=0.95, lam=lam)[0].values, *expected)


def test_rewards_to_go_by_hand() -> None:
    found = rewards_to_go(ragged([1, 2, 3], [], [4]), 0.5)
    assert near(found.values, 1 + 0.5 * 2 + 0.25 * 3, 2 + 0.5 * 3, 3, 4)


def test_a_not_a_number_stays_in_its_row() -> None:
    found = rewards_to_go(ragged([1, 1], [math.nan], [2]), 1.0).values.tolist()
    assert found[:2] == [2, 1]
    assert found[3] == 2


def test_whitening_by_hand() -> None:
    # Mean 2, deviations -1, -1, 2, squares over n - 1: 6 / 2.
    assert near(whiten(ragged([1], [1, 4])).values, *(x / math.sqrt(3 + 1e-8) for x in (-1, -1, 2)))


@pytest.mark.parametrize("rows", [[[3.0]], [[], [3.0]], [[2.0, 2.0], [2.0]]])
def test_whitening_one_token_or_equal_ones_gives_zero(rows: list[list[float]]) -> None:
    assert whiten(ragged(*rows)).values.abs().max() == 0


def test_whitening_nothing() -> None:
    assert len(whiten(ragged([], [])).values) == 0


def test_grpo_by_hand() -> None:
    # Groups in any order: 7 has 1, 0, 0, 1 (mean .5, squares over n - 1: 1 / 3), 3 has 2, 4 (mean 3, squares 2).
    groups = torch.tensor([7, 3, 7, 7, 3, 7])
    rewards = numbers(1, 2, 0, 0, 4, 1)
    of_7, of_3 = 0.5 / (math.sqrt(1 / 3) + 1e-6), 1 / (math.sqrt(2) + 1e-6)
    assert near(grpo(rewards, groups), of_7, -of_3, -of_7, -of_7, of_3, of_7)
    assert near(dr_grpo(rewards, groups), 0.5, -1, -0.5, -0.5, 1, 0.5)
    # Less the mean of the others: 1 - 1/3, 2 - 4, 0 - 2/3, ...
    assert near(rloo(rewards, groups), 2 / 3, -2, -2 / 3, -2 / 3, 2, 2 / 3)


@settings(max_examples=40)
@given(st.lists(st.tuples(st.integers(0, 3), FLOATS), min_size=1, max_size=12))
def test_rloo_is_the_reward_less_the_mean_of_the_others(rows: list[tuple[int, float]]) -> None:
    expected = []
    for at, (group, reward) in enumerate(rows):
        others = [x for other, (g, x) in enumerate(rows) if g == group and other != at]
        expected.append(reward - sum(others) / len(others) if others else 0.0)
    found = rloo(numbers(*(reward for _, reward in rows)), torch.tensor([group for group, _ in rows]))
    assert near(found, *expected)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
def test_a_group_of_one_has_no_advantage(advantage: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert advantage(numbers(5, 1, 3), torch.tensor([0, 1, 1])).tolist()[0] == 0


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_groups_of_equal_rewards_have_exactly_no_advantage(
    advantage: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> None:
    """The mean of seven times 0.1 is not 0.1: over a deviation that is rounding alone, that would be an advantage."""
    rewards = torch.tensor([0.1] * 7 + [0.7] * 7, dtype=dtype)
    found = advantage(rewards, torch.arange(14) // 7)
    assert found.abs().max() == 0
    assert found.dtype == dtype


def test_reinforce_pp_by_hand() -> None:
    # To go, gamma 1: .8, .9 and -.2: mean .5, squares over n - 1: (.09 + .16 + .49) / 2.
    found = reinforce_pp(ragged([-0.1, 0.9], [-0.2]), gamma=1.0)
    assert near(found.values, *(x / math.sqrt(0.37 + 1e-8) for x in (0.3, 0.4, -0.7)))


def test_reinforce_pp_with_a_baseline_by_hand() -> None:
    # Less the group's mean: .5, -.5, 0, 0, with 1, 2, 1, 1 tokens: mean -.1, squares over n - 1: .7 / 4.
    tokens = ragged([0], [0, 0], [0], [0])
    found = reinforce_pp_baseline(numbers(1, 0, 1, 1), torch.tensor([0, 0, 1, 1]), tokens)
    assert near(found.values, *(x / math.sqrt(0.175 + 1e-8) for x in (0.6, -0.4, -0.4, 0.1, 0.1)))
    assert found.lengths.tolist() == [1, 2, 1, 1]


def test_remax_by_hand() -> None:
    found = remax(ragged([-0.1, 0.9], [], [0.5]), numbers(0.3, 0.2, 1))
    assert near(found.values, 0.8 - 0.3, 0.9 - 0.3, 0.5 - 1)


def test_degenerate_groups() -> None:
    groups = torch.tensor([4, 9, 4, 9, 2])
    assert is_degenerate(numbers(1, 0, 1, 1, 3), groups).tolist() == [True, False, True, False, True]
    assert is_degenerate(numbers(1, 0, 1, 0, 3), groups).all(), "nothing of the batch is left"
    assert is_degenerate(numbers(), torch.zeros(0, dtype=torch.int64)).tolist() == []


def test_overlong_penalty_by_hand() -> None:
    found = overlong_penalty(torch.tensor([0, 6, 7, 8, 10, 12]), max_length=10, window=4)
    assert near(found, 0, 0, -0.25, -0.5, -1, -1)


@pytest.mark.parametrize("window", [0, 11])
def test_a_window_beyond_the_length_is_refused(window: int) -> None:
    with pytest.raises(ConfigError, match=f"window of {window} tokens before a length of 10"):
        overlong_penalty(torch.tensor([1]), max_length=10, window=window)


def test_columns_that_do_not_belong_together_are_refused() -> None:
    with pytest.raises(DataError, match=r"groups of shape \(1,\) beside rewards of shape \(2,\)"):
        grpo(numbers(1, 2), torch.tensor([0]))
    with pytest.raises(DataError, match=r"groups of dtype torch\.float64: must be integers"):
        grpo(numbers(1, 2), numbers(0, 0))
    with pytest.raises(DataError, match=r"values of lengths \[2, 1\] beside rewards of lengths \[1, 2\]"):
        gae(ragged([1], [2, 3]), ragged([1, 2], [3]), gamma=1, lam=1)


@pytest.mark.parametrize("rule", [grpo, dr_grpo, rloo])
def test_whole_numbers_as_rewards_are_refused(rule: Callable[[Tensor, Tensor], Tensor]) -> None:
    # In their dtype every advantage of a group of a right and a wrong answer would be 0.
    with pytest.raises(DataError, match=r"rewards of dtype torch.int64: must be floating"):
        rule(torch.tensor([1, 0]), torch.tensor([0, 0]))
