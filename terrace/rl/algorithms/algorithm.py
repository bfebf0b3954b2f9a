"""The numbers of an algorithm, with those of its paper as defaults, and the policy's loss that they give.

The rest of an algorithm is its controller (`terrace.rl.controllers.controllers`).
"""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from torch import Tensor

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.schema import load
from terrace.rl.algorithms.aggregation import Aggregation, Form
from terrace.rl.algorithms.batches import WEIGHTS, TokenLoss
from terrace.rl.algorithms.kl import Estimator
from terrace.rl.algorithms.losses import (
    cispo,
    clipped_surrogate,
    entropy_loss,
    gspo,
    kl_loss,
    response_log_ratios,
    rloo,
)
from terrace.rl.algorithms.metrics import rollout_sums
from terrace.rl.values.ragged import Ragged

Name = Literal[
    "ppo",
    "grpo",
    "dr-grpo",
    "rloo",
    "reinforce++",
    "reinforce++-baseline",
    "remax",
    "dapo",
    "gspo",
    "cispo",
    "safe-rlhf",
]
NEEDS_CRITIC = ("ppo", "safe-rlhf")
SAMPLES_AGAIN = ("dapo", "cispo")  # in place of groups of equal rewards
_OF_RESPONSES = ("rloo", "gspo")  # have one ratio for a whole response

# What papers have otherwise than the defaults below.
_PAPERS: Mapping[str, Mapping[str, Any]] = {
    "ppo": {"kl": "reward", "kl_estimator": "k1", "value_clip": 0.2},
    "grpo": {"aggregation": "seq-mean-token-mean"},
    "dr-grpo": {"aggregation": "seq-mean-token-sum-norm"},
    # A response is one action: the mean over its tokens of a loss that all of them share.
    "rloo": {"aggregation": "seq-mean-token-mean", "kl": "reward", "kl_estimator": "k1"},
    "reinforce++": {"kl": "reward", "kl_estimator": "k1"},
    "reinforce++-baseline": {"kl_estimator": "k2"},
    "remax": {"aggregation": "seq-mean-token-sum", "kl": "reward", "kl_estimator": "k1"},
    "dapo": {"clip_high": 0.28},
    # Ratios of responses hardly differ from 1.
    "gspo": {"aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
    # Without a lower clip.
    "cispo": {"clip_low": 1.0},
    "safe-rlhf": {"kl": "reward", "kl_estimator": "k1", "value_clip": 0.2},
}
assert set(_PAPERS) == set(get_args(Name)), "each algorithm has a row"


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """Raises `ConfigError` for values out of range, and for an option without effect under `name`."""

    name: Name = "grpo"
    clip_low: float = 0.2  # of the ratio of policies, below 1 and above it
    clip_high: float = 0.2
    dual_clip: float | None = None  # bounds the loss of tokens with negative advantages; usual is 3
    aggregation: Form = "token-mean"
    kl: Literal["reward", "loss"] = "loss"  # where the distance from the reference counts
    kl_estimator: Estimator = "k3"
    kl_coefficient: float = 0.0
    kl_target: float | None = None  # the coefficient adapts to it (Ziegler et al., 1909.08593)
    kl_horizon: float = 10_000.0  # responses in which it does
    entropy: float = 0.0  # coefficient of the entropy, which keeps it up
    gamma: float = 1.0
    lam: float = 0.95  # of GAE
    value_clip: float | None = None
    importance_bound: float | None = None  # truncates weights of training over rollout (TIS); usual is 2
    overlong_window: int = 0  # tokens before the longest in which the penalty of DAPO and CISPO grows; 0: no penalty
    cost_threshold: float | None = None  # the mean cost that Safe-RLHF allows
    multiplier: float = 1.0  # of Safe-RLHF, at the start
    multiplier_rate: float = 0.1
    multiplier_largest: float = 10.0

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coefficient", "entropy", "overlong_window"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)} must be 0 or more")
        for name in ("kl_coefficient", "kl_target", "entropy", "cost_threshold", "multiplier", "multiplier_rate"):
            value = getattr(self, name)
            if value is not None and not math.isfinite(value):
                raise ConfigError(f"algorithm.{name} = {value} must be a finite number")
        for name in ("gamma", "lam"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)} must be above 0 and at most 1")
        positive = ("kl_target", "kl_horizon", "value_clip", "importance_bound", "multiplier", "multiplier_rate")
        for name in positive:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"algorithm.{name} = {value} must be above 0")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ConfigError(f"algorithm.dual_clip = {self.dual_clip} must be above 1")
        if not self.multiplier_largest >= self.multiplier:
            raise ConfigError(
                f"algorithm.multiplier = {self.multiplier} must be at most multiplier_largest = "
                f"{self.multiplier_largest}"
            )
        if (self.name == "safe-rlhf") != (self.cost_threshold is not None):
            raise ConfigError(
                f"algorithm.cost_threshold = {self.cost_threshold} with algorithm.name = {self.name!r}: exactly "
                "safe-rlhf has one"
            )
        if self.kl == "loss" and self.kl_estimator == "k1" and self.kl_coefficient:
            raise ConfigError("algorithm.kl_estimator = 'k1' has a gradient of mean 0 as a loss: take k2 or k3")
        self._refuse_without_effect()

    def _refuse_without_effect(self) -> None:
        critic, safe = self.name in NEEDS_CRITIC, self.name == "safe-rlhf"
        has_effect = {
            **dict.fromkeys(("lam", "value_clip"), critic),
            **dict.fromkeys(("multiplier", "multiplier_rate", "multiplier_largest"), safe),
            "gamma": critic or self.name == "reinforce++",
            "dual_clip": self.name not in (*_OF_RESPONSES, "cispo"),
            "overlong_window": self.name in SAMPLES_AGAIN,
            "kl_target": self.kl_coefficient > 0,
            "kl_horizon": self.kl_target is not None,
        }
        usual = _PAPERS[self.name]
        for each in fields(self):
            value = getattr(self, each.name)
            if not has_effect.get(each.name, True) and value != usual.get(each.name, each.default):
                raise ConfigError(
                    f"algorithm.{each.name} = {value!r} has no effect under algorithm.name = {self.name!r} and "
                    f"algorithm.kl_coefficient = {self.kl_coefficient:g}: leave it out"
                )

    def aggregate(self, max_length: int) -> Aggregation:
        """Weights of tokens; `max_length` is the longest response that is drawn."""
        return Aggregation(self.aggregation, max_length if self.aggregation == "seq-mean-token-sum-norm" else None)


def algorithm_of(table: Mapping[str, Any]) -> Algorithm:
    """The algorithm of a table `[algorithm]`: keys that it leaves out are those of the algorithm's paper."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"algorithm must be a table, not {table!r}")
    name = table.get("name", Algorithm.name)
    if not isinstance(name, str) or name not in _PAPERS:
        raise ConfigError(f"algorithm.name = {name!r} is not known{did_you_mean(str(name), _PAPERS)}")
    return load(Algorithm, {**_PAPERS[name], **table}, "algorithm")


Sums = defaultdict[str, float]  # of a number over tokens, and their number under "tokens"


def policy_loss(algorithm: Algorithm, sums: Sums) -> TokenLoss:
    """The loss of a policy, which adds its figures to `sums`.

    Columns: `old` log-probabilities and `advantages`; where they are there, `kl_weight` (the coefficient, at every
    token) with `reference` log-probabilities, `importance`, which multiplies the weights, and `rollout`, with which the
    log-probabilities are compared. Rows without advantages are examples, whose likelihood is raised.
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
    if algorithm.name in _OF_RESPONSES:
        log_ratios = response_log_ratios(x, old, offsets, is_mean=algorithm.name == "gspo")
    ratios = log_ratios.exp()
    clipped = (ratios < 1 - algorithm.clip_low) | (ratios > 1 + algorithm.clip_high)
    sums["tokens"] += x.numel()
    sums["pg_clipfrac"] += float(clipped.sum())
    sums["ppo_kl"] += float((old - x).sum())
    if entropies is not None:
        sums["entropy"] += float(entropies.detach().sum())


def _compare(sums: Sums, logprobs: Ragged, rollout: Tensor) -> None:
    for name, value in rollout_sums(logprobs, logprobs.with_values(rollout)).items():
        sums[name] = max(sums[name], value) if name.endswith("_max") else sums[name] + value
