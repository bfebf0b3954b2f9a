"""Policy and critic losses, as SUMS over tokens: the step divides once (`terrace.rl.algorithms.aggregation`).

A loss takes flat columns (N) of the valid tokens of whole responses, and is differentiable in the first column.
`weights` (N) are the aggregation's, times those of `importance.py` where rollout and training differ.
The sums of a step's micro-batches add up to the step's sum.

Shape legend: N tokens, R responses. rho = exp(logprobs - old_logprobs), the probability ratio of the current policy to
the policy that scored the batch.
"""

import torch
from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.rl.algorithms.algorithm import Estimator
from terrace.rl.algorithms.kl import LARGEST_LOG_RATIO, estimates
from terrace.rl.values.ragged import check_shapes, row_of_each, row_sums


def reinforce(logprobs: Tensor, advantages: Tensor, weights: Tensor) -> Tensor:
    """Sum of -A log pi: the policy gradient of Williams (1992), for samples of the current policy."""
    check_shapes(logprobs=logprobs, advantages=advantages, weights=weights)
    return -(weights * advantages * logprobs).sum()


def clipped_surrogate(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """Sum of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) (PPO, Schulman et al., 1707.06347, eq. 7).

    DAPO clips at 0.2 and 0.28 (2503.14476, eq. 10). `dual_clip` c bounds the loss of a token with a negative advantage
    by -c A (Ye et al., 1912.09729, eq. 5); 3 is common.
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    losses = _surrogate(_ratio(logprobs - old_logprobs), advantages, clip_low, clip_high)
    if dual_clip is not None:
        if dual_clip <= 1:
            raise ConfigError(f"dual_clip {dual_clip:g}: must be above 1, the ratio of an unchanged policy")
        losses = torch.where(advantages < 0, torch.minimum(losses, -dual_clip * advantages), losses)
    return (weights * losses).sum()


def rloo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    offsets: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Tensor:
    """The clipped surrogate with one ratio per response, exp(sum of log rho): a response is one action.

    Before the first update rho is 1, so the gradient is REINFORCE's: A times the gradient of the response's
    log-probability (RLOO, 2402.14740, eq. 7). The paper samples again for every update; ratio and clips, as in TRL,
    allow several mini-batches a step. Otherwise as `gspo`.
    """
    ratios = response_log_ratios(logprobs, old_logprobs, offsets, is_mean=False)
    return _of_responses(ratios, advantages, weights, clip_low, clip_high)


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    offsets: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> Tensor:
    """The clipped surrogate with one ratio per response, exp(mean of log rho) (GSPO, 2507.18071, eqs. 5 and 7).

    `offsets` (R + 1) delimit the responses. Each token carries its response's loss, so the aggregation
    seq-mean-token-mean gives the paper's mean over responses. The default clips are the paper's.
    """
    ratios = response_log_ratios(logprobs, old_logprobs, offsets, is_mean=True)
    return _of_responses(ratios, advantages, weights, clip_low, clip_high)


def response_log_ratios(logprobs: Tensor, old_logprobs: Tensor, offsets: Tensor, *, is_mean: bool) -> Tensor:
    """Sum of log rho over a response, or its mean if `is_mean`, copied to each of its tokens (N)."""
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs)
    sums = row_sums(logprobs - old_logprobs, offsets)
    return (sums / offsets.diff().clamp(min=1) if is_mean else sums)[row_of_each(offsets)]


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, weights: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Sum of -sg(clip(rho, 1 - clip_low, 1 + clip_high)) A log pi, sg stop-gradient (CISPO, 2506.13585, eqs. 4, 5).

    Clipped tokens still have a gradient. The paper has no lower clip (`clip_low` = 1).
    """
    check_shapes(logprobs=logprobs, old_logprobs=old_logprobs, advantages=advantages, weights=weights)
    ratios = _ratio(logprobs.detach() - old_logprobs).clamp(1 - clip_low, 1 + clip_high)
    return reinforce(logprobs, advantages, weights * ratios)


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, weights: Tensor, *, clip: float | None = None
) -> Tensor:
    """Sum of max((V - return)^2, (V_clip - return)^2) / 2, with V_clip within `clip` of the old value.

    The clip is that of PPO's first implementation (Dhariwal et al., OpenAI Baselines, 2017). Without it the loss is
    (V - return)^2 / 2.
    """
    check_shapes(values=values, old_values=old_values, returns=returns, weights=weights)
    losses = (values - returns).square()
    if clip is not None:
        near = torch.clamp(values, old_values - clip, old_values + clip)
        losses = torch.maximum(losses, (near - returns).square())
    return 0.5 * (weights * losses).sum()


def kl_loss(logprobs: Tensor, reference: Tensor, weights: Tensor, estimator: Estimator) -> Tensor:
    """Sum of the per-token estimates of KL(policy || reference) (`kl.estimates`), to be added to a loss.

    On the policy's own samples, the expected gradient of k2 is that of the KL. That of k3, which GRPO uses (2402.03300,
    eq. 4), is not. That of k1 is 0, so k1 raises `ConfigError`.
    """
    if estimator == "k1":
        raise ConfigError("k1 as a loss has a gradient of mean 0: take k2 or k3, or put k1 into the reward")
    check_shapes(logprobs=logprobs, weights=weights)
    return (weights * estimates(logprobs, reference, estimator)).sum()


def entropy_loss(entropy: Tensor, weights: Tensor) -> Tensor:
    """Sum of -H, the policy's entropy at each token: added to a loss with a coefficient, it keeps entropy high."""
    check_shapes(entropy=entropy, weights=weights)
    return -(weights * entropy).sum()


def _of_responses(log_ratios: Tensor, advantages: Tensor, weights: Tensor, low: float, high: float) -> Tensor:
    check_shapes(logprobs=log_ratios, advantages=advantages, weights=weights)
    return (weights * _surrogate(_ratio(log_ratios), advantages, low, high)).sum()


def _ratio(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _surrogate(ratios: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -torch.minimum(ratios * advantages, ratios.clamp(1 - clip_low, 1 + clip_high) * advantages)
