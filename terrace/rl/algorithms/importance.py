"""Weights for rollouts that another engine than the training one drew.

Kernels, formats and versions of weights differ, so that training finds other log-probabilities for the same tokens. The
ratio of the two, bounded or masked, multiplies the weights of a loss; it has no gradient and leaves the divisor alone.

Shape legend: N tokens, R responses.
"""

import torch

from terrace.base.errors import ConfigError
from terrace.rl.values.ragged import Ragged, check_rows


@torch.no_grad()
def token_ratios(logprobs: Ragged, rollout: Ragged) -> Ragged:
    """exp(logprobs - rollout) of each token.

    `logprobs` are training's before the first update on the batch, `rollout` those of the distribution drawn from.
    """
    check_rows(logprobs=logprobs, rollout=rollout)
    return logprobs.with_values((logprobs.values - rollout.values).exp())


@torch.no_grad()
def sequence_ratios(logprobs: Ragged, rollout: Ragged) -> Ragged:
    """The product of a response's `token_ratios`, at each of its tokens: unbiased, but of a far larger variance."""
    check_rows(logprobs=logprobs, rollout=rollout)
    return logprobs.spread(logprobs.with_values(logprobs.values - rollout.values).sums().exp())


def truncated(ratios: Ragged, bound: float) -> Ragged:
    """min(ratio, bound): truncated importance sampling (Ionides 2008; TIS, Yao et al. 2025, with a bound of 2)."""
    if bound <= 0:
        raise ConfigError(f"bound {bound:g} of importance weights: must be above 0")
    return ratios.with_values(ratios.values.clamp(max=bound))


def masked(ratios: Ragged, low: float, high: float) -> Ragged:
    """The ratio between `low` and `high`, and 0 outside: tokens on which the engines disagree teach nothing."""
    if not 0 <= low < high:
        raise ConfigError(f"importance weights from {low:g} to {high:g}: must be 0 or more, and ascend")
    inside = (ratios.values >= low) & (ratios.values <= high)
    return ratios.with_values(torch.where(inside, ratios.values, 0))
