"""Numbers of algorithms: those of papers, those that cannot be, and those without effect."""

import math
from dataclasses import fields
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError
from terrace.rl.algorithms.algorithm import Algorithm, algorithm_of
from terrace.rl.algorithms.batches import WEIGHTS
from terrace.rl.algorithms.losses import clipped_surrogate, kl_loss
from terrace.rl.algorithms.metrics import Sums
from terrace.rl.algorithms.policy_loss import policy_loss
from terrace.rl.values.ragged import Ragged


def test_keys_that_are_left_out_are_those_of_the_paper() -> None:
    assert algorithm_of({}).name == "grpo"
    assert algorithm_of({"name": "dapo"}).clip_high == 0.28
    assert algorithm_of({"name": "dapo", "clip_high": 0.3}).clip_high == 0.3
    assert algorithm_of({"name": "gspo"}).clip_low == 3e-4
    assert algorithm_of({"name": "reinforce++-baseline"}).kl_estimator == "k2"
    assert algorithm_of({"name": "rloo"}).aggregation == "seq-mean-token-mean"
    assert algorithm_of({"name": "remax"}).clip_high == 0.2
    assert len(fields(Algorithm)) < 25


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"name": "gpro"}, "algorithm.name = 'gpro' is not known"),
        ({"clip": 0.2}, "unknown key algorithm.clip; did you mean 'algorithm.clip_"),
        ({"clip_low": -1.0}, "algorithm.clip_low = -1.0 must be 0 or more"),
        ({"name": "ppo", "lam": 1.5}, "algorithm.lam = 1.5 must be above 0 and at most 1"),
        ({"lam": 0.9}, "algorithm.lam = 0.9 has no effect under algorithm.name = 'grpo'"),
        ({"name": "cispo", "dual_clip": 3.0}, "algorithm.dual_clip = 3.0 has no effect"),
        ({"dual_clip": 1.0}, "algorithm.dual_clip = 1.0 must be above 1"),
        ({"kl_target": 0.1}, "algorithm.kl_target = 0.1 has no effect under .* algorithm.kl_coefficient = 0: leave"),
        ({"kl_coefficient": 0.1, "kl_horizon": 5.0}, "algorithm.kl_horizon = 5.0 has no effect"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "'k1' has a gradient of mean 0 as a loss"),
        ({"name": "safe-rlhf"}, "algorithm.cost_threshold = None .* exactly safe-rlhf has one"),
        ({"cost_threshold": 0.1}, "exactly safe-rlhf has one"),
        ({"name": "safe-rlhf", "cost_threshold": math.nan}, "algorithm.cost_threshold = nan must be a finite number"),
        ({"entropy": math.inf}, "algorithm.entropy = inf must be a finite number"),
        ({"name": "distill", "kl_coefficient": 0.0}, "algorithm.kl_coefficient = 0 under 'distill', which learns from"),
        ({"name": "distill", "kl": "loss"}, "algorithm.kl = 'loss' under 'distill', where the k1 of a token"),
        ({"name": "distill", "kl_target": 0.1}, "algorithm.kl_target = 0.1 under 'distill'"),
        ({"name": "distill", "gamma": 0.9}, "algorithm.gamma = 0.9 has no effect"),
        ({"name": []}, r"algorithm.name = \[\] is not known"),
        (3, "algorithm must be a table, not 3"),
        ({"name": "safe-rlhf", "cost_threshold": 0.1, "multiplier": 20.0}, "must be at most multiplier_largest"),
    ],
)
def test_what_cannot_be_or_has_no_effect_is_refused(table: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        algorithm_of(table)


def test_the_loss_of_a_policy_by_its_columns() -> None:
    logprobs = Ragged(torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([0, 2, 3]))
    old, advantages = torch.tensor([-1.5, -2.0, -0.4]), torch.tensor([1.0, 1.0, -1.0])
    weights, importance = torch.tensor([0.5, 0.5, 1.0]), torch.tensor([1.0, 2.0, 0.5])
    reference, weight = torch.tensor([-1.0, -1.0, -1.0]), torch.full((3,), 0.1)
    columns = {WEIGHTS: weights, "old": old, "advantages": advantages}
    sums = Sums()
    loss = policy_loss(algorithm_of({"entropy": 0.1}), sums)
    entropies = torch.tensor([1.0, 2.0, 3.0])
    surrogate = clipped_surrogate(logprobs.values, old, advantages, weights)
    found = loss(logprobs, entropies, columns)
    torch.testing.assert_close(found, surrogate - 0.1 * (0.5 + 1.0 + 3.0))
    # exp(0.5) is beyond the clip, exp(0) and exp(-0.1) are not.
    read = sums.read()
    assert (read["tokens"], read["pg_clipfrac"], read["entropy"]) == (3, 1, 6)
    assert read["ppo_kl"] == pytest.approx(-0.5 + 0 + 0.1)
    more = {**columns, "importance": importance, "kl_weight": weight, "reference": reference}
    scaled = weights * importance
    wanted = clipped_surrogate(logprobs.values, old, advantages, scaled)
    wanted = wanted + kl_loss(logprobs.values, reference, 0.1 * scaled, "k3")
    torch.testing.assert_close(policy_loss(algorithm_of({}), sums)(logprobs, None, more), wanted)
    # Without advantages: minus the likelihood.
    assert float(loss(logprobs, None, {WEIGHTS: weights})) == 0.5 + 1.0 + 0.5


@pytest.mark.parametrize(("name", "share"), [("grpo", 0.5), ("rloo", 0.5), ("gspo", 1.0)])
def test_the_share_of_clipped_tokens_is_by_the_ratio_that_is_clipped(name: str, share: float) -> None:
    """Log-ratios of tokens are .5, -.4, -.1 and -.2; of responses .1 and -.3, and half of that as means."""
    logprobs = Ragged(torch.tensor([-1.0, -2.4, -0.5, -0.8]), torch.tensor([0, 2, 4]))
    columns = {WEIGHTS: torch.ones(4), "old": torch.tensor([-1.5, -2.0, -0.4, -0.6]), "advantages": torch.ones(4)}
    sums = Sums()
    policy_loss(algorithm_of({"name": name}), sums)(logprobs, None, columns)
    read = sums.read()
    assert read["pg_clipfrac"] / read["tokens"] == pytest.approx(share)


def test_entropies_that_are_not_there_are_refused() -> None:
    columns = {name: torch.zeros(1) for name in (WEIGHTS, "old", "advantages")}
    with pytest.raises(ConfigError, match="entropies are not there where a tensor axis cuts the vocabulary"):
        policy_loss(algorithm_of({"entropy": 0.1}), Sums())(Ragged(torch.zeros(1), torch.tensor([0, 1])), None, columns)
