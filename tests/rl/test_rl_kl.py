"""Divergence, its coefficient, and Safe RLHF's multiplier, against figures worked out by hand."""

import math
from dataclasses import replace

import pytest
import torch

from terrace.base.errors import ConfigError, DataError
from terrace.rl.algorithms.kl import adapted, estimates, penalised, token_rewards
from terrace.rl.algorithms.lagrange import Multiplier, mixed
from terrace.rl.values.ragged import Ragged


def column(*rows: list[float]) -> Ragged:
    return Ragged.of([torch.tensor(row, dtype=torch.float64) for row in rows])


@pytest.mark.parametrize(
    ("estimator", "expected"), [("k1", [0.5, -1.0]), ("k2", [0.125, 0.5]), ("k3", [math.exp(-0.5) - 0.5, math.e - 2])]
)
def test_estimators_by_hand(estimator: str, expected: list[float]) -> None:
    logprobs, reference = column([-1.0, -2.0]).values, column([-1.5, -1.0]).values  # d = -.5 and 1
    assert estimates(logprobs, reference, estimator).tolist() == pytest.approx(expected, rel=1e-12)  # type: ignore[arg-type]


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ConfigError, match="'k4': must be k1, k2 or k3"):
        estimates(torch.zeros(1), torch.zeros(1), "k4")  # type: ignore[arg-type]


def test_unbiased_estimators_have_the_mean_of_the_divergence() -> None:
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    logs, others = torch.tensor(p).double().log(), torch.tensor(q).double().log()
    divergence = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    for estimator in ("k1", "k3"):
        mean = (logs.exp() * estimates(logs, others, estimator)).sum()
        assert float(mean) == pytest.approx(divergence, rel=1e-6)


def test_token_rewards_by_hand() -> None:
    found = token_rewards(torch.tensor([1.0, 0.0, -2.0]), column([0.5, -1.0], [], [2.0]), 0.1)
    assert found.values.tolist() == pytest.approx([-0.05, 0.1 + 1, -0.2 - 2], rel=1e-6)
    assert found.lengths.tolist() == [2, 0, 1]


def test_a_reward_that_no_token_carries_is_refused() -> None:
    with pytest.raises(DataError, match="response 1 is empty, but its reward is 1: no token carries it"):
        token_rewards(torch.tensor([0.0, 1.0]), column([0.5], []), 0.1)


def test_penalised_rewards_by_hand() -> None:
    found = penalised(torch.tensor([1.0, 3.0], dtype=torch.float64), column([0.5, -1.5, 0.25], []), 0.2)
    assert found.tolist() == pytest.approx([1 - 0.2 * -0.75, 3], rel=1e-12)


@pytest.mark.parametrize(
    ("kl", "expected"),
    [
        (6.0, 0.1),
        (5.4, 0.1 * (1 - 0.1 * 256 / 10_000)),
        (100.0, 0.1 * (1 + 0.2 * 256 / 10_000)),
        (-3.0, 0.1 * (1 - 0.2 * 256 / 10_000)),
    ],
)
def test_adaptive_coefficient_by_hand(kl: float, expected: float) -> None:
    assert adapted(0.1, kl, 256, target=6.0, horizon=10_000) == pytest.approx(expected, rel=1e-12)


def test_a_target_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="target 0 and horizon 10 of the KL coefficient"):
        adapted(0.1, 1.0, 1, target=0, horizon=10)


MULTIPLIER = Multiplier(threshold=1.0, rate=0.1, window=4, largest=5.0)


def test_multiplier_by_hand() -> None:
    assert MULTIPLIER.value == 1
    # Mean 3, 2 too much: ln lambda = 0 + .1 x 1 x 2.
    first = MULTIPLIER.updated([2.0, 4.0])
    assert first.value == pytest.approx(math.exp(0.2), rel=1e-12)
    # The last four are 4, 0, 0, 0: mean 1, as allowed.
    second = first.updated([0.0, 0.0, 0.0])
    assert second.costs == (4.0, 0.0, 0.0, 0.0)
    assert second.log_value == first.log_value
    # Mean 0, 1 too little: the step has lambda's own size.
    third = second.updated([0.0])
    assert third.log_value == pytest.approx(0.2 - 0.1 * math.exp(0.2), rel=1e-12)


def test_multiplier_stays_above_zero_and_below_its_largest() -> None:
    high, low = MULTIPLIER, MULTIPLIER
    for _ in range(200):
        high, low = high.updated([50.0]), low.updated([-50.0])
    assert high.value == pytest.approx(5.0, rel=1e-12)
    assert 0 < low.value < 1
    assert MULTIPLIER.updated([]) == MULTIPLIER


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rate": 0.0}, "rate 0, window 4 and largest 5 of the multiplier: must be above 0"),
        ({"window": 0}, "window 0"),
        ({"largest": -1.0}, "largest -1"),
        ({"log_value": math.log(6)}, "multiplier of 6: must be at most largest = 5"),
    ],
)
def test_multipliers_that_cannot_be_are_refused(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(MULTIPLIER, **wrong)  # type: ignore[arg-type]


def test_mixed_advantages_by_hand() -> None:
    found = mixed(column([2.0, 0.0], [], [1.0]), column([1.0, 3.0], [], [-1.0]), 0.5)
    assert found.values.tolist() == pytest.approx([(2 - 0.5) / 1.5, -1.5 / 1.5, 1.5 / 1.5], rel=1e-12)


def test_safe_rlhf_shares_the_divergence_between_reward_and_cost() -> None:
    """With half the coefficient in each, the mixed token rewards have -beta/2 kl (1 + lambda) / (1 + lambda)."""
    kl, none = column([0.4, -0.2]), torch.zeros(1, dtype=torch.float64)
    reward, cost = token_rewards(none, kl, 0.05), token_rewards(none, kl, -0.05)
    assert mixed(reward, cost, 3.0).values.tolist() == pytest.approx([-0.05 * 0.4, 0.05 * 0.2], rel=1e-12)


def test_a_far_reference_makes_no_infinity() -> None:
    d = torch.tensor([99.0], dtype=torch.float32)
    assert estimates(-d, torch.zeros(1), "k3").isfinite().all()


def test_what_would_turn_the_coefficient_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"must be above 12000"):
        adapted(0.1, 0.0, 60_000, target=6.0, horizon=10_000)
    with pytest.raises(DataError, match=r"rewards of dtype torch.int64"):
        token_rewards(torch.tensor([1]), column([0.4]), 0.1)
