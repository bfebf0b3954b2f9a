"""Hyperparameters of an algorithm, with its paper's as defaults, and the traits that rules check. Needs no torch.

Their loss is in `terrace.rl.algorithms.policy_loss`; the rest of an algorithm is its controller
(`terrace.rl.controllers.controllers`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from terrace.base.errors import ConfigError, did_you_mean
from terrace.base.schema import load
from terrace.runtime.settings import LARGEST

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
    "distill",
]
Form = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
Estimator = Literal["k1", "k2", "k3"]
Baseline = Literal["group", "batch", "greedy", "critic", "reference"]


@dataclass(frozen=True, kw_only=True)
class Traits:
    """Properties of an algorithm that do not depend on its hyperparameters.

    `baseline` is what a reward is compared with: the other responses to its prompt (group), the other responses of the
    step (batch), the greedy response to its prompt (greedy), or a critic's value (critic). With "reference" nothing is
    compared: the reference's log-probabilities are the rewards, of each token its own. `paper` holds the paper's
    hyperparameters where they differ from the defaults of `Algorithm`.
    """

    baseline: Baseline
    paper: Mapping[str, Any] = field(default_factory=dict)
    has_token_rewards: bool = False  # discounted over the tokens of a response
    samples_again: bool = False  # in place of groups of equal rewards
    is_of_responses: bool = False  # one ratio of policies for a whole response
    clips_dually: bool = True
    has_cost: bool = False

    @property
    def has_critic(self) -> bool:
        return self.baseline == "critic"

    @property
    def is_distilled(self) -> bool:
        return self.baseline == "reference"


_KL_IN_REWARD = {"kl": "reward", "kl_estimator": "k1"}
TRAITS: Mapping[str, Traits] = {
    "ppo": Traits(baseline="critic", paper={**_KL_IN_REWARD, "value_clip": 0.2}, has_token_rewards=True),
    "grpo": Traits(baseline="group", paper={"aggregation": "seq-mean-token-mean"}),
    "dr-grpo": Traits(baseline="group", paper={"aggregation": "seq-mean-token-sum-norm"}),
    # A response is one action. All its tokens carry the same loss, so their mean is that loss.
    "rloo": Traits(
        baseline="group",
        paper={"aggregation": "seq-mean-token-mean", **_KL_IN_REWARD},
        is_of_responses=True,
        clips_dually=False,
    ),
    "reinforce++": Traits(baseline="batch", paper=_KL_IN_REWARD, has_token_rewards=True),
    "reinforce++-baseline": Traits(baseline="group", paper={"kl_estimator": "k2"}),
    "remax": Traits(baseline="greedy", paper={"aggregation": "seq-mean-token-sum", **_KL_IN_REWARD}),
    "dapo": Traits(baseline="group", paper={"clip_high": 0.28}, samples_again=True),
    # Ratios of responses hardly differ from 1.
    "gspo": Traits(
        baseline="group",
        paper={"aggregation": "seq-mean-token-mean", "clip_low": 3e-4, "clip_high": 4e-4},
        is_of_responses=True,
        clips_dually=False,
    ),
    # Without a lower clip.
    "cispo": Traits(baseline="group", paper={"clip_low": 1.0}, samples_again=True, clips_dually=False),
    "safe-rlhf": Traits(
        baseline="critic", paper={**_KL_IN_REWARD, "value_clip": 0.2}, has_token_rewards=True, has_cost=True
    ),
    "distill": Traits(baseline="reference", paper={**_KL_IN_REWARD, "kl_coefficient": 1.0}),
}
assert set(TRAITS) == set(get_args(Name)), "each algorithm has a row"


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """The table `[algorithm]`. Raises `ConfigError` for values out of range, and for keys without effect."""

    name: Name = "grpo"  # whose paper has the defaults of the other keys
    clip_low: float = 0.2  # of the ratio of policies, below 1
    clip_high: float = 0.2  # above 1
    dual_clip: float | None = None  # bounds the loss of tokens with negative advantages; usual is 3
    aggregation: Form = "token-mean"  # how losses of tokens become one
    kl: Literal["reward", "loss"] = "loss"  # where the distance from the reference counts
    kl_estimator: Estimator = "k3"  # of the distance from the reference, by token
    kl_coefficient: float = 0.0  # of the distance from the reference; 0: it is only measured
    kl_target: float | None = None  # the coefficient adapts to it (Ziegler et al., 1909.08593)
    kl_horizon: float = 10_000.0  # responses in which it does
    entropy: float = 0.0  # coefficient of the entropy, which keeps it up
    gamma: float = 1.0  # discount of rewards of tokens
    lam: float = 0.95  # of GAE
    value_clip: float | None = None  # of a critic's values, around those before the update
    importance_bound: float | None = None  # truncates weights of training over rollout (TIS); usual is 2
    overlong_window: int = 0  # tokens before the longest in which the penalty of DAPO and CISPO grows; 0: no penalty
    cost_threshold: float | None = None  # the mean cost that Safe-RLHF allows
    multiplier: float = 1.0  # of Safe-RLHF, at the start
    multiplier_rate: float = 0.1  # at which its logarithm follows the mean cost
    multiplier_largest: float = 10.0  # the multiplier stays at most this

    def __post_init__(self) -> None:
        for name in ("clip_low", "clip_high", "kl_coefficient", "entropy", "overlong_window"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"algorithm.{name} = {getattr(self, name)} must be 0 or more")
        # inf turns the upper clip or the bound of importance weights off.
        for item in fields(self):
            value = getattr(self, item.name)
            may_be_infinite = item.name in ("clip_high", "importance_bound")
            if not isinstance(value, float) or (may_be_infinite and value == math.inf):
                continue
            if not math.isfinite(value):
                raise ConfigError(f"algorithm.{item.name} = {value} must be a finite number")
            if abs(value) > LARGEST and item.name != "kl_horizon":
                raise ConfigError(f"algorithm.{item.name} = {value:g} must be at most {LARGEST:g}")
        if self.clip_low > 1:
            raise ConfigError(f"algorithm.clip_low = {self.clip_low} must be at most 1, which clips no ratio")
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
        if self.traits.has_cost != (self.cost_threshold is not None):
            raise ConfigError(
                f"algorithm.cost_threshold = {self.cost_threshold} with algorithm.name = {self.name!r}: exactly "
                "safe-rlhf has one"
            )
        self._check_distilled()
        if self.kl == "loss" and self.kl_estimator == "k1" and self.kl_coefficient:
            raise ConfigError("algorithm.kl_estimator = 'k1' has a gradient of mean 0 as a loss: take k2 or k3")
        for item in fields(self):
            usual = self.traits.paper.get(item.name, item.default)
            if getattr(self, item.name) != usual and (why := self.without_effect(item.name)):
                raise ConfigError(f"algorithm.{item.name} = {getattr(self, item.name)!r} has no effect {why}")

    def _check_distilled(self) -> None:
        """Raise `ConfigError` for a reward of tokens whose gradient would not be that of the reverse KL."""
        if not self.traits.is_distilled:
            return
        if not self.kl_coefficient:
            raise ConfigError(
                "algorithm.kl_coefficient = 0 under 'distill', which learns from nothing else: leave it out"
            )
        for key, needed in {**_KL_IN_REWARD, "kl_target": None}.items():
            if getattr(self, key) != needed:
                raise ConfigError(
                    f"algorithm.{key} = {getattr(self, key)!r} under 'distill', where the k1 of a token is its "
                    "reward, with a fixed coefficient: leave it out"
                )

    @property
    def traits(self) -> Traits:
        return TRAITS[self.name]

    def without_effect(self, key: str) -> str:
        """Why `key` has no effect with the other keys as they are, and what to do; "" if it has one."""
        return _WITHOUT_EFFECT[key](self) if key in _WITHOUT_EFFECT else ""


def _under(algorithm: Algorithm, has_effect: bool, why: str) -> str:
    return "" if has_effect else f"under algorithm.name = {algorithm.name!r}{why}: leave it out"


def _of_kl(algorithm: Algorithm) -> str:
    return _under(algorithm, algorithm.kl_coefficient > 0, " and algorithm.kl_coefficient = 0")


def _of_cost(algorithm: Algorithm) -> str:
    return _under(algorithm, algorithm.traits.has_cost, ", which has no cost")


def _of_critic(algorithm: Algorithm) -> str:
    return _under(algorithm, algorithm.traits.has_critic, ", which has no critic")


_WITHOUT_EFFECT: Mapping[str, Callable[[Algorithm], str]] = {
    **dict.fromkeys(("lam", "value_clip"), _of_critic),
    **dict.fromkeys(("multiplier", "multiplier_rate", "multiplier_largest"), _of_cost),
    **dict.fromkeys(("kl", "kl_estimator", "kl_target"), _of_kl),
    "kl_horizon": lambda each: _under(each, each.kl_target is not None, " without an algorithm.kl_target"),
    "gamma": lambda each: _under(each, each.traits.has_token_rewards, ", which has no rewards of tokens to discount"),
    "dual_clip": lambda each: _under(each, each.traits.clips_dually, ", whose loss has no bound of its own"),
    "overlong_window": lambda each: _under(each, each.traits.samples_again, ", which has no penalty for long ones"),
}


def algorithm_of(table: Mapping[str, Any]) -> Algorithm:
    """Parse a table `[algorithm]`; missing keys default to the values of the algorithm's paper."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"algorithm must be a table, not {table!r}")
    name = table.get("name", Algorithm.name)
    if not isinstance(name, str) or name not in TRAITS:
        raise ConfigError(f"algorithm.name = {name!r} is not known{did_you_mean(str(name), TRAITS)}")
    return load(Algorithm, {**TRAITS[name].paper, **table}, "algorithm")
