"""One controller per algorithm: a generator that runs a step of role calls for each item.

    for metrics in grpo(setup): ...

A step draws responses, scores them, computes advantages on the controller, and updates the roles that learn. Between
two steps, the caller logs, evaluates, saves and stops.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from terrace.rl.algorithms import advantages
from terrace.rl.algorithms.kl import token_rewards
from terrace.rl.algorithms.lagrange import mixed
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.controllers.setup import Setup
from terrace.rl.controllers.step import (
    TEXTS,
    drawn,
    fitted_values,
    in_rewards,
    kl_of,
    learned,
    only,
    outcomes_of,
    overlong,
    rewarded,
    scored,
)
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import Rows, cat

_MOST_ROUNDS = 8  # rounds of sampling to fill a batch of DAPO or CISPO; a guess

Controller = Callable[[Setup], Iterator[Metrics]]
_OfGroups = Callable[[Tensor, Tensor], Tensor]  # (rewards, groups) -> advantages, (R) each


def of_groups(setup: Setup, estimate: _OfGroups) -> Iterator[Metrics]:
    """GRPO, Dr. GRPO, GSPO and RLOO: a response is compared with the others to its prompt."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        estimated = estimate(outcomes_of(setup, rows), rows.tensor("groups"))
        yield learned(setup, rows, rows.ragged("old").spread(estimated.float()))


def reinforce_pp(setup: Setup) -> Iterator[Metrics]:
    """REINFORCE++: rewards to go, whitened over the batch."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        yield learned(setup, rows, advantages.reinforce_pp(by_token, gamma=setup.algorithm.gamma))


def reinforce_pp_baseline(setup: Setup) -> Iterator[Metrics]:
    """REINFORCE++ with the group mean as a baseline."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        outcomes, groups = outcomes_of(setup, rows), rows.tensor("groups")
        yield learned(setup, rows, advantages.reinforce_pp_baseline(outcomes, groups, rows.ragged("old")))


def remax(setup: Setup) -> Iterator[Metrics]:
    """ReMax: a response is compared with the greedy one to its prompt, which the stream draws as well."""
    while True:
        both = rewarded(setup, drawn(setup))
        is_greedy = both.tensor("greedy")
        rows, greedy = scored(setup, both.take(~is_greedy)), both.take(is_greedy)
        baseline = dict(zip(greedy.tensor("groups").tolist(), greedy.tensor("reward").tolist(), strict=True))
        of_greedy = torch.tensor([baseline[group] for group in rows.tensor("groups").tolist()])
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        yield learned(setup, rows, advantages.remax(by_token, of_greedy))


def dapo(setup: Setup) -> Iterator[Metrics]:
    """DAPO and CISPO: drop groups of equal rewards and draw others until the batch is full, in at most 8 rounds."""
    while True:
        kept, rewards, rounds, num, tokens = list[Rows](), list[Tensor](), 0, 0, 0
        while num < setup.sizes.prompts * setup.sizes.responses and rounds < _MOST_ROUNDS:
            rows, rounds = overlong(setup, rewarded(setup, drawn(setup))), rounds + 1
            tokens += sum(len(rows.ragged(name).values) for name in ("prompts", "responses"))
            rewards.append(rows.tensor("reward").double())
            kept.append(rows.take(~advantages.is_degenerate(rows.tensor("reward"), rows.tensor("groups"))))
            num += len(kept[-1])
        rows = cat(kept).take(range(min(num, setup.sizes.prompts * setup.sizes.responses)))
        found: Metrics = {"group/rounds": float(rounds), "group/kept": float(len(rows)), "group/tokens": float(tokens)}
        # Over all drawn groups: the kept ones are neither all right nor all wrong, so their mean says little.
        found["group/reward"] = float(torch.cat(rewards).mean())
        if len(rows):
            rows = scored(setup, rows)
            estimated = advantages.grpo(outcomes_of(setup, rows), rows.tensor("groups"))
            found |= learned(setup, rows, rows.ragged("old").spread(estimated.float()))
        else:
            setup.progress.step += 1
        yield found


def ppo(setup: Setup) -> Iterator[Metrics]:
    """PPO: generalised advantages from a critic's values, whitened."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        values = setup.roles.critic.values(only(rows, *TEXTS)).ragged("values")
        estimated, returns = advantages.gae(by_token, values, gamma=setup.algorithm.gamma, lam=setup.algorithm.lam)
        found = fitted_values(setup, setup.roles.critic, rows, values, returns)
        yield found | learned(setup, rows, advantages.whiten(estimated))


def safe_rlhf(setup: Setup) -> Iterator[Metrics]:
    """Safe RLHF: PPO on reward minus multiplier x cost, with a critic for each; each gets half of the KL penalty."""
    gamma, lam = setup.algorithm.gamma, setup.algorithm.lam
    while True:
        rows = rewarded(setup, drawn(setup))
        rows = scored(setup, rows | setup.roles.cost.rewards(rows))
        costs, half = rows.tensor("cost"), in_rewards(setup) / 2
        assert setup.progress.multiplier is not None, "Safe RLHF has a multiplier"
        setup.progress.multiplier = multiplier = setup.progress.multiplier.updated(costs.tolist())
        found = {"safe/lambda": multiplier.value, "safe/cost": float(costs.mean())}
        found["safe/violation"] = found["safe/cost"] - multiplier.threshold
        estimated = dict[str, Ragged]()
        for name, critic, sign in (("reward", setup.roles.critic, 1), ("cost", setup.roles.cost_critic, -1)):
            by_token = token_rewards(rows.tensor(name), kl_of(rows), sign * half)
            values = critic.values(only(rows, *TEXTS)).ragged("values")
            own, returns = advantages.gae(by_token, values, gamma=gamma, lam=lam)
            prefix = "critic" if name == "reward" else "cost_critic"
            found |= fitted_values(setup, critic, rows, values, returns, prefix)
            estimated[name] = advantages.whiten(own)
        yield found | learned(setup, rows, mixed(estimated["reward"], estimated["cost"], multiplier.value))


def distill(setup: Setup) -> Iterator[Metrics]:
    """On-policy distillation: the reverse KL to the reference, on the policy's own responses (GKD, Agarwal et al.,
    2306.13649, section 3.1; MiniLLM, Gu et al., 2306.08543, eq. 1).

    A token's reward is minus its log-ratio to the reference, and its advantage is this reward alone, without those of
    later tokens (gamma 0): the part of the gradient of least variance ("single-step", MiniLLM, section 2.2). Rewards of
    responses are measured and do not count.
    """
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        kl = rows.ragged("kl")
        yield learned(setup, rows, kl.with_values(-in_rewards(setup) * kl.values))


CONTROLLERS: dict[str, Controller] = {
    "ppo": ppo,
    "grpo": partial(of_groups, estimate=advantages.grpo),
    "dr-grpo": partial(of_groups, estimate=advantages.dr_grpo),
    "rloo": partial(of_groups, estimate=advantages.rloo),
    "reinforce++": reinforce_pp,
    "reinforce++-baseline": reinforce_pp_baseline,
    "remax": remax,
    "dapo": dapo,
    "gspo": partial(of_groups, estimate=advantages.grpo),
    "cispo": dapo,
    "safe-rlhf": safe_rlhf,
    "distill": distill,
}
