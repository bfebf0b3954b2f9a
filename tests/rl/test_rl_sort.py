"""The cases of bench/rl_learning.py: each is its paper's algorithm, and the verdicts can fail.

Two of them run at night, for minutes on a core: GRPO learns the task `sort` by its rewards alone, and rewards dealt out
anew teach nothing.
"""

from pathlib import Path

import pytest

from bench.rl_learning import BARS, constrained, learned, verdict
from terrace.rl.algorithms.algorithm import algorithm_of
from terrace.rl.algorithms.metrics import Metrics


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", ["grpo", "shuffled"])
def test_the_task_is_learned_by_its_rewards_alone(name: str, tmp_path: Path) -> None:
    passed, words = verdict(name, BARS[name], learned(name, BARS[name], 0, tmp_path))
    assert passed, words


@pytest.mark.nightly
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_policy_comes_near_another_by_distillation(seed: int, tmp_path: Path) -> None:
    passed, words = verdict("distill", BARS["distill"], learned("distill", BARS["distill"], seed, tmp_path))
    assert passed, words


def test_every_algorithm_is_judged_as_in_its_paper() -> None:
    """Clips that never hold would make GSPO another algorithm: those of tokens are 500 times those of responses."""
    for name, bar in BARS.items():
        if name != "safe-rlhf":
            assert "algorithm" not in bar.keys
    assert algorithm_of({"name": "gspo"}).clip_high < 1e-3


def steps_of(reward: float, cost: float, multipliers: list[float]) -> list[Metrics]:
    given = {"reward/mean": reward, "safe/cost": cost, "safe/violation": cost - 0.7, "response_length/mean": 8.5}
    return [{**given, "safe/lambda": each} for each in multipliers]


@pytest.mark.parametrize(
    ("reward", "cost", "multipliers", "passes"),
    [
        (0.5, 0.69, [0.2, 0.4, 0.39, 0.38, 0.38, 0.38, 0.38], True),
        (0.5, 0.71, [0.2, 0.4, 0.39, 0.38, 0.38, 0.38, 0.38], False),  # beyond the threshold
        (0.3, 0.69, [0.2, 0.4, 0.39, 0.38, 0.38, 0.38, 0.38], False),  # at the cost of the reward
        (0.5, 0.69, [0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5], False),  # still rising
        (0.5, 0.69, [0.2] * 7, False),  # never rose
    ],
)
def test_a_constraint_is_kept_at_a_small_loss(
    reward: float, cost: float, multipliers: list[float], passes: bool
) -> None:
    free = steps_of(0.5, 0.75, [0.0] * 7)
    assert constrained(steps_of(reward, cost, multipliers), free)[0] is passes
    short: list[Metrics] = [{**step, "response_length/mean": 7.5} for step in free]
    assert not constrained(steps_of(reward, cost, multipliers), short)[0], "a threshold that does not bind"


def test_drawn_rewards_are_of_all_responses() -> None:
    """Groups that DAPO learns from are neither all right nor all wrong: their mean would be above the bar at once."""
    step = {
        "reward/mean": 0.5,
        "group/reward": 0.3,
        "val/reward": 0.5,
        "start/reward": 0.4,
        "rollout/logprob_diff_max": 0.0,
    }
    assert not verdict("dapo", BARS["dapo"], [step])[0]
    assert verdict("grpo", BARS["dapo"], [{**step, "group/reward": 0.4}])[0]
