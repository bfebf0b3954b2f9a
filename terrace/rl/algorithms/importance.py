"""Importance weights for rollouts that were sampled by another engine than training's.

Kernels, formats and weight versions differ, so that training computes other log-probabilities for the same tokens. The
probability ratio, truncated or masked, multiplies the loss weights. It has no gradient and does not change the divisor.

Shape legend: N tokens, R responses.
"""

import torch

from terrace.base.errors import ConfigError
from terrace.rl.values.ragged import Ragged, check_rows


@torch.no_grad()
def token_ratios(logprobs: Ragged, rollout: Ragged) -> Ragged:
    """exp(logprobs - rollout) of each token.

    `logprobs` are training's, before the first update on the batch; `rollout` are the sampling distribution's.
    """
    check_rows(logprobs=logprobs, rollout=rollout)
    return logprobs.with_values((logprobs.values - rollout.values).exp())


@torch.no_grad()
def sequence_ratios(logprobs: Ragged, rollout: Ragged) -> Ragged:
    """The product of a response's `token_ratios`, at each of its tokens: unbiased, but with a far larger variance."""
    check_rows(logprobs=logprobs, rollout=rollout)
    return logprobs.spread(logprobs.with_values(logprobs.values - rollout.values).sums().exp())


def truncated(ratios: Ragged, bound: float) -> Ragged:
    """min(ratio, bound): truncated importance sampling (Ionides 2008; TIS, Yao et al. 2025, with a bound of 2)."""
    if bound <= 0:
        raise ConfigError(f"bound {bound:g} of importance weights: must be above 0")
    return ratios.with_values(ratios.values.clamp(max=bound))


def masked(ratios: Ragged, low: float, high: float) -> Ragged:
    """The ratio where it is between `low` and `high`, else 0, which drops tokens on which the engines disagree."""
    if not 0 <= low < high:
        raise ConfigError(f"importance weights from {low:g} to {high:g}: must be 0 or more, and ascend")
    inside = (ratios.values >= low) & (ratios.values <= high)
    return ratios.with_values(torch.where(inside, ratios.values, 0))
