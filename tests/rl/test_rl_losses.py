"""Losses and their gradients against figures worked out by hand; aggregation; importance weights; pairs."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.importance import masked, sequence_ratios, token_ratios, truncated
from terrace.rl.algorithms.losses import (
    cispo,
    clipped_surrogate,
    entropy_loss,
    gspo,
    kl_loss,
    reinforce,
    rloo,
    value_loss,
)
from terrace.rl.values.ragged import Ragged
from terrace.runtime.pairs import bradley_terry, dpo


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def found(loss: Callable[[Tensor], Tensor], *at: float) -> tuple[float, list[float]]:
    """A loss and its gradient at these numbers."""
    x = numbers(*at).requires_grad_()
    value = loss(x)
    (gradient,) = torch.autograd.grad(value, x)
    return float(value.detach()), gradient.tolist()


def near(result: tuple[float, list[float]], value: float, *gradient: float) -> bool:
    return result[0] == pytest.approx(value, rel=1e-12) and result[1] == pytest.approx(list(gradient), rel=1e-12)


ONE = numbers(1)
UP, DOWN, FAR = math.log(1.5), math.log(0.5), math.log(5)


def surrogate(advantage: float, dual_clip: float | None = None, high: float = 0.2) -> Callable[[Tensor], Tensor]:
    # The old log-probability is -1, so the ratio is exp(x + 1).
    def loss(x: Tensor) -> Tensor:
        old = numbers(-1)
        return clipped_surrogate(x, old, numbers(advantage), ONE, clip_low=0.2, clip_high=high, dual_clip=dual_clip)

    return loss


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "value", "gradient"),
    [
        (UP, 1, -1.2, 0),  # min(1.5, 1.2): clipped, no gradient
        (UP, -1, 1.5, 1.5),  # min(-1.5, -1.2)
        (DOWN, 1, -0.5, -0.5),  # min(.5, .8)
        (DOWN, -1, 0.8, 0),  # min(-.5, -.8)
        (0, 2, -2, -2),  # the first update on a batch
    ],
)
def test_clipped_surrogate_by_hand(log_ratio: float, advantage: float, value: float, gradient: float) -> None:
    assert near(found(surrogate(advantage), log_ratio - 1), value, gradient)


def test_the_upper_clip_may_be_higher() -> None:
    assert near(found(surrogate(2, high=0.28), UP - 1), -2 * 1.28, 0)
    assert near(found(surrogate(2, high=0.6), UP - 1), -2 * 1.5, -3)


def test_dual_clip_bounds_losses_of_negative_advantages() -> None:
    assert near(found(surrogate(-2), FAR - 1), 10, 10)
    assert near(found(surrogate(-2, dual_clip=3), FAR - 1), 6, 0)  # max(min(-10, -2.4), 3 x -2)
    assert near(found(surrogate(-2, dual_clip=3), UP - 1), 3, 3)
    assert near(found(surrogate(2, dual_clip=3), FAR - 1), -2.4, 0)
    with pytest.raises(ConfigError, match="dual_clip 1: must be above 1"):
        surrogate(1, dual_clip=1)(numbers(-1))


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_that_would_overflow_has_a_finite_gradient(advantage: float) -> None:
    value, gradient = found(surrogate(advantage), 1e4)
    assert all(map(math.isfinite, [value, *gradient]))


def of_rloo(log_ratio: float, advantage: float) -> tuple[float, list[float]]:
    """Loss and gradient of a response of two tokens, of which the first alone has moved."""

    def loss(x: Tensor) -> Tensor:
        weights = Aggregation("seq-mean-token-mean").weights(torch.tensor([2]), torch.float64)
        return rloo(x, numbers(-1, -2), numbers(advantage, advantage), weights, torch.tensor([0, 2]))

    return found(loss, log_ratio - 1, -2)


def test_rloo_by_hand() -> None:
    # REINFORCE, before the policy has moved: every token of the response by its advantage.
    assert near(of_rloo(0, 2), -2, -2, -2)
    # The ratio is of the response: at 1.5 no token of it is raised further, and at .5 none is lowered further.
    assert near(of_rloo(UP, 1), -1.2, 0, 0)
    assert near(of_rloo(UP, -1), 1.5, 1.5, 1.5)
    assert near(of_rloo(DOWN, -1), 0.8, 0, 0)


def test_gspo_by_hand() -> None:
    # Responses of 2, 0 and 1 tokens; log ratios .2, .4 (mean .3) and -.1; advantages -1 and 2; clips .2.
    def loss(x: Tensor) -> Tensor:
        weights = Aggregation("seq-mean-token-mean").weights(torch.tensor([2, 0, 1]), torch.float64)
        offsets = torch.tensor([0, 2, 2, 3])
        return gspo(x, numbers(-1, -2, -3), numbers(-1, -1, 2), weights, offsets, clip_low=0.2, clip_high=0.2)

    s, t = math.exp(0.3), math.exp(-0.1)
    assert near(found(loss, -0.8, -1.6, -3.1), s - 2 * t, s / 2, s / 2, -2 * t)


def test_gspo_clips_whole_responses() -> None:
    def loss(x: Tensor) -> Tensor:
        return gspo(x, numbers(0, 0), numbers(1, 1), numbers(0.5, 0.5), torch.tensor([0, 2]))

    # Mean log ratio .3, though the second token alone would not be clipped.
    assert near(found(loss, 0.6, 0.0), -1.0004, 0, 0)


def test_cispo_by_hand() -> None:
    def loss(x: Tensor) -> Tensor:
        return cispo(x, numbers(-1, -1, -1), numbers(2, -1, 1), numbers(1, 1, 0.5), clip_low=0.2, clip_high=0.3)

    # Ratios 1.5, .5 and 1 become 1.3, .8 and 1; a clipped token has its gradient all the same.
    logprobs = [UP - 1, DOWN - 1, -1]
    value = -(1.3 * 2 * logprobs[0] - 0.8 * logprobs[1] + 0.5 * logprobs[2])
    assert near(found(loss, *logprobs), value, -2.6, 0.8, -0.5)


def test_reinforce_by_hand() -> None:
    assert near(found(lambda x: reinforce(x, numbers(2, -1), numbers(1, 0.5)), -3, -4), 6 - 2, -2, 0.5)


def test_value_loss_by_hand() -> None:
    # 1 beside an old value of .5 is .7 within .2. For a return of 2: squares 1 and 1.69; for 0: 1 and .49.
    def loss(target: float, clip: float | None) -> Callable[[Tensor], Tensor]:
        return lambda x: value_loss(x, numbers(0.5), numbers(target), numbers(3), clip=clip)

    assert near(found(loss(2, 0.2), 1), 3 * 0.845, 0)
    assert near(found(loss(0, 0.2), 1), 1.5, 3)
    assert near(found(loss(2, None), 1), 1.5, -3)


def test_kl_losses_by_hand() -> None:
    def loss(estimator: str) -> Callable[[Tensor], Tensor]:
        return lambda x: kl_loss(x, numbers(-1.5), numbers(2), estimator)  # type: ignore[arg-type]

    # d = -.5; the derivatives of d^2 / 2 and of exp(d) - d - 1 by the log-probability are -d and 1 - exp(d).
    assert near(found(loss("k2"), -1), 0.25, 1.0)
    assert near(found(loss("k3"), -1), 2 * (math.exp(-0.5) - 0.5), 2 * (1 - math.exp(-0.5)))
    with pytest.raises(ConfigError, match="k1 as a loss has a gradient of mean 0"):
        loss("k1")(numbers(-1))


def test_entropy_loss_by_hand() -> None:
    assert near(found(lambda x: entropy_loss(x, numbers(1, 0.5)), 2, 3), -3.5, -1, -0.5)


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation("token-mean"), 15 / 5),
        (Aggregation("seq-mean-token-mean"), (1.5 + 4) / 2),
        (Aggregation("seq-mean-token-sum"), (3 + 12) / 2),
        (Aggregation("seq-mean-token-sum-norm", 10), 15 / 20),
    ],
)
def test_aggregations_by_hand(aggregation: Aggregation, expected: float) -> None:
    """Losses 1, 2 of the first response, none of an empty one, 3, 4, 5 of the third."""
    lengths = torch.tensor([2, 0, 3])
    total = (aggregation.weights(lengths, torch.float64) * numbers(1, 2, 3, 4, 5)).sum()
    assert float(total / aggregation.counts(lengths).sum()) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("mean",), "aggregation 'mean': must be one of token-mean, "),
        (("token-mean", 5), "only seq-mean-token-sum-norm is over a constant length"),
        (("seq-mean-token-sum-norm",), "with max_length None"),
        (("seq-mean-token-sum-norm", 0), "max_length 0 of an aggregation: must be 1 or more"),
    ],
)
def test_aggregations_that_cannot_be_are_refused(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Aggregation(*given)  # type: ignore[arg-type]


def test_importance_weights_by_hand() -> None:
    # Ratios 3 and .5, their product 1.5; 4 alone.
    offsets = torch.tensor([0, 2, 2, 3])
    training = Ragged(numbers(math.log(3) - 1, math.log(0.5) - 2, math.log(4) - 3).requires_grad_(), offsets)
    rollout = Ragged(numbers(-1, -2, -3), offsets)
    tokens, sequences = token_ratios(training, rollout), sequence_ratios(training, rollout)
    assert not tokens.values.requires_grad
    assert not sequences.values.requires_grad
    assert truncated(tokens, 2).values.tolist() == pytest.approx([2, 0.5, 2], rel=1e-12)
    assert truncated(sequences, 2).values.tolist() == pytest.approx([1.5, 1.5, 2], rel=1e-12)
    assert masked(tokens, 0.25, 3.5).values.tolist() == pytest.approx([3, 0.5, 0], rel=1e-12)
    assert masked(sequences, 1.6, 5).values.tolist() == pytest.approx([0, 0, 4], rel=1e-12)


def test_an_infinite_ratio_is_truncated_and_masked() -> None:
    ratios = token_ratios(Ragged.of([numbers(0)]), Ragged.of([numbers(-1e4)]))
    assert truncated(ratios, 2).values.tolist() == [2]
    assert masked(ratios, 0.5, 2).values.tolist() == [0]


def test_bounds_of_importance_weights_are_checked() -> None:
    ratios = Ragged.of([numbers(1)])
    with pytest.raises(ConfigError, match="bound 0 of importance weights"):
        truncated(ratios, 0)
    with pytest.raises(ConfigError, match="importance weights from 2 to 1"):
        masked(ratios, 2, 1)


def test_pairs_by_hand() -> None:
    sigmoid = 1 / (1 + math.exp(-1))  # of 2 - 1
    assert near(found(lambda x: bradley_terry(x, numbers(1)), 2), math.log1p(math.exp(-1)), sigmoid - 1)

    # The policy prefers by -1 + 2 = 1, the reference by -3 + 2.5 = -.5: .1 x 1.5.
    def loss(x: Tensor) -> Tensor:
        return dpo(x, numbers(-2), numbers(-3), numbers(-2.5), beta=0.1)

    assert near(found(loss, -1), math.log1p(math.exp(-0.15)), 0.1 * (1 / (1 + math.exp(-0.15)) - 1))
    both = bradley_terry(numbers(2, 0), numbers(1, 0))
    assert float(both) == pytest.approx(math.log1p(math.exp(-1)) + math.log(2), rel=1e-12)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda one, two: reinforce(two, one, two),
        lambda one, two: clipped_surrogate(two, two, one, two),
        lambda one, two: gspo(two, one, two, two, torch.tensor([0, 2])),
        lambda one, two: rloo(two, two, one, two, torch.tensor([0, 2])),
        lambda one, two: cispo(two, two, one, two, clip_low=1, clip_high=1),
        lambda one, two: value_loss(two, two, two, one),
        lambda one, two: kl_loss(two, one, two, "k3"),
        lambda one, two: entropy_loss(two, one),
        lambda one, two: bradley_terry(two, one),
        lambda one, two: dpo(two, two, two, one, beta=1),
    ],
)
def test_nothing_is_broadcast(wrong: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(DataError, match=r"of shape \(1,\) beside .* of shape \(2,\): must be the same"):
        wrong(numbers(1), numbers(1, 2))
