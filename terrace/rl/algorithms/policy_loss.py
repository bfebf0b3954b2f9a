"""The policy loss and the aggregation of token losses that an `Algorithm` configures."""

from collections.abc import Mapping

from torch import Tensor

from terrace.base.errors import ConfigError
from terrace.rl.algorithms.aggregation import Aggregation
from terrace.rl.algorithms.algorithm import TRAITS, Algorithm
from terrace.rl.algorithms.batches import WEIGHTS, TokenLoss
from terrace.rl.algorithms.losses import (
    cispo,
    clipped_surrogate,
    entropy_loss,
    gspo,
    kl_loss,
    response_log_ratios,
    rloo,
)
from terrace.rl.algorithms.metrics import Sums, rollout_sums
from terrace.rl.values.ragged import Ragged


def aggregation_of(algorithm: Algorithm, max_length: int) -> Aggregation:
    """The aggregation of `algorithm`; `max_length` is the longest response that may be sampled."""
    form = algorithm.aggregation
    return Aggregation(form, max_length if form == "seq-mean-token-sum-norm" else None)


def policy_loss(algorithm: Algorithm, sums: Sums) -> TokenLoss:
    """The policy loss; each call adds its metrics to `sums`.

    Required columns: `old` log-probabilities and `advantages`. Optional: `kl_weight` (the KL coefficient at every
    token) with `reference` log-probabilities; `importance`, which multiplies the weights; `rollout` log-probabilities,
    for metrics. Without `advantages` the loss is the negative log-likelihood (supervised examples).
    """

    def loss(logprobs: Ragged, entropies: Tensor | None, columns: Mapping[str, Tensor]) -> Tensor:
        x = logprobs.values
        given = {name: column.to(x.dtype) for name, column in columns.items()}
        weights = given[WEIGHTS]
        if "advantages" not in given:
            return -(weights * x).sum()
        if "importance" in given:
            weights = weights * given["importance"]
        total = _policy(algorithm, x, given["old"], given["advantages"], weights, logprobs.offsets)
        if algorithm.entropy:
            if entropies is None:
                raise ConfigError("algorithm.entropy: entropies are not there where a tensor axis cuts the vocabulary")
            total = total + algorithm.entropy * entropy_loss(entropies, weights)
        if "kl_weight" in given:
            by_token = weights * given["kl_weight"]
            total = total + kl_loss(x, given["reference"], by_token, algorithm.kl_estimator)
        _note(sums, algorithm, logprobs.with_values(x.detach()), given["old"], entropies)
        if "rollout" in given:
            _compare(sums, logprobs.with_values(x.detach()), given["rollout"])
        return total

    return loss


def _policy(
    algorithm: Algorithm, x: Tensor, old: Tensor, advantages: Tensor, weights: Tensor, offsets: Tensor
) -> Tensor:
    low, high = algorithm.clip_low, algorithm.clip_high
    if algorithm.name == "rloo":
        return rloo(x, old, advantages, weights, offsets, clip_low=low, clip_high=high)
    if algorithm.name == "gspo":
        return gspo(x, old, advantages, weights, offsets, clip_low=low, clip_high=high)
    if algorithm.name == "cispo":
        return cispo(x, old, advantages, weights, clip_low=low, clip_high=high)
    dual = algorithm.dual_clip
    return clipped_surrogate(x, old, advantages, weights, clip_low=low, clip_high=high, dual_clip=dual)


def _note(sums: Sums, algorithm: Algorithm, logprobs: Ragged, old: Tensor, entropies: Tensor | None) -> None:
    x, offsets = logprobs.values, logprobs.offsets
    log_ratios = x - old
    if TRAITS[algorithm.name].is_of_responses:
        log_ratios = response_log_ratios(x, old, offsets, is_mean=algorithm.name == "gspo")
    ratios = log_ratios.exp()
    clipped = (ratios < 1 - algorithm.clip_low) | (ratios > 1 + algorithm.clip_high)
    sums.add("tokens", x.numel())
    sums.add("pg_clipfrac", clipped.sum())
    sums.add("ppo_kl", (old - x).sum())
    if entropies is not None:
        sums.add("entropy", entropies.sum())


def _compare(sums: Sums, logprobs: Ragged, rollout: Tensor) -> None:
    for name, value in rollout_sums(logprobs, logprobs.with_values(rollout)).items():
        sums.add(name, value)
