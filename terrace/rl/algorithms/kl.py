"""KL divergence from the reference policy: estimators per token, KL in the reward, and an adaptive coefficient.

For KL as a loss, see `terrace.rl.algorithms.losses.kl_loss`. Shape legend: N tokens, R responses.
"""

from torch import Tensor

from terrace.base.errors import ConfigError, DataError
from terrace.rl.algorithms.algorithm import Estimator
from terrace.rl.values.ragged import Ragged, check_shapes

# exp(20) = 5e8 is far beyond any clip. An overflowing ratio would make k3 infinite, and give the branch of the minimum
# that is not selected a gradient of 0 * inf. verl has the same bound.
LARGEST_LOG_RATIO = 20.0


def estimates(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(policy || reference) per token, (N), from log-probabilities (N) of tokens sampled from the policy.

    With d = reference - logprobs (Schulman, "Approximating KL divergence", 2020):

        k1 = -d              unbiased, of either sign
        k2 = d^2 / 2         biased; on the policy's own samples its expected gradient is that of the KL
        k3 = exp(d) - d - 1  unbiased, never negative
    """
    check_shapes(logprobs=logprobs, reference=reference)
    d = reference - logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    if estimator == "k3":
        bounded = d.clamp(max=LARGEST_LOG_RATIO)
        return bounded.expm1() - bounded
    raise ConfigError(f"estimator of KL {estimator!r}: must be k1, k2 or k3")


def token_rewards(outcomes: Tensor, kl: Ragged, coefficient: float) -> Ragged:
    """r_t = -coefficient kl_t + [t = T] outcome, for response `outcomes` (R) (Ouyang et al., 2203.02155, eq. 2).

    Raises `DataError` for an empty response with an outcome other than 0, which no token could carry.

    Safe-RLHF uses half the coefficient in the reward, and minus that half in the cost.
    """
    check_shapes(outcomes=outcomes, lengths=kl.lengths)
    if not outcomes.is_floating_point():
        raise DataError(f"rewards of dtype {outcomes.dtype}: must be floating, since KL is subtracted from them")
    lost = ((kl.lengths == 0) & (outcomes != 0)).nonzero().flatten().tolist()
    if lost:
        raise DataError(
            f"response {lost[0]} is empty, but its reward is {float(outcomes[lost[0]]):g}: no token carries it; drop "
            "empty responses first"
        )
    full = (kl.lengths > 0).nonzero().flatten()
    rewards = -coefficient * kl.values.to(outcomes.dtype)
    return kl.with_values(rewards.index_add(0, kl.offsets[1:][full] - 1, outcomes[full]))


def penalised(outcomes: Tensor, kl: Ragged, coefficient: float) -> Tensor:
    """outcome - coefficient * sum of `kl` over the response, (R): the reward of algorithms without token rewards."""
    check_shapes(outcomes=outcomes, lengths=kl.lengths)
    return outcomes - coefficient * kl.sums()


def adapted(coefficient: float, kl: float, num_responses: int, *, target: float, horizon: float) -> float:
    """The coefficient after a batch with mean KL `kl`, summed over each response (Ziegler et al., 1909.08593).

    e = clip(kl / target - 1, -0.2, 0.2)        coefficient (1 + e num_responses / horizon)
    """
    if target <= 0 or horizon <= 0:
        raise ConfigError(f"target {target:g} and horizon {horizon:g} of the KL coefficient: must be above 0")
    if num_responses >= 5 * horizon:
        raise ConfigError(
            f"horizon {horizon:g} of the KL coefficient: a batch of {num_responses} responses could turn its sign; it "
            f"must be above {num_responses / 5:g}"
        )
    error = min(max(kl / target - 1, -0.2), 0.2)
    return coefficient * (1 + error * num_responses / horizon)
