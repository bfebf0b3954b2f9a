"""Algorithms as programs: a generator of steps each, over the calls of roles.

    for metrics in grpo(setup): ...

A step draws responses, scores them, computes advantages here, and updates the roles that learn. What surrounds it
(logging, evaluating, saving, stopping) is the caller's, between two steps. `Progress` is all that a controller keeps
from one step to the next, beside the weights.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from terrace.rl import advantages
from terrace.rl.algorithm import Algorithm
from terrace.rl.importance import token_ratios, truncated
from terrace.rl.kl import adapted, estimates, penalised, token_rewards
from terrace.rl.lagrange import Multiplier, mixed
from terrace.rl.metrics import ROLLOUT, Metrics, joined, of_rows, of_tokens
from terrace.rl.ragged import Ragged
from terrace.rl.rows import Rows, cat
from terrace.rl.stream import Stream, lags

_MOST_ROUNDS = 8  # of drawing prompts until the batch of DAPO or CISPO is full; a guess
_TEXTS = ("prompts", "responses")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Global sizes of an iteration: `prompts` times `responses` rows, learned in `mini_batch` rows, `epochs` times."""

    prompts: int
    responses: int
    mini_batch: int
    num_tokens: int  # of the longest response
    epochs: int = 1


@dataclass(frozen=True, kw_only=True)
class Roles:
    """The roles of an algorithm, each with the calls of its worker (`terrace.rl.workers`). `rewards` have a weight.

    Their stream has the role that draws, which is the actor or follows it.
    """

    actor: Any
    rewards: tuple[tuple[float, Any], ...]
    reference: Any = None
    critic: Any = None
    cost: Any = None
    cost_critic: Any = None


@dataclass(kw_only=True)
class Progress:
    """The state of a run beside its weights and its stream: steps and updates done, coefficients."""

    kl_coefficient: float
    multiplier: Multiplier | None = None
    step: int = 0
    updates: int = 0  # of the actor: several a step


@dataclass(frozen=True, kw_only=True)
class Setup:
    """All that a controller reads; `lr(step)` are the learning rates of the actor and of critics, from step 0."""

    roles: Roles
    algorithm: Algorithm
    stream: Stream
    sizes: Sizes
    progress: Progress
    lr: Callable[[int], float]
    critic_lr: Callable[[int], float] = field(default=lambda step: 0.0)
    # Sees the rows that a step learns from, with the advantages of their tokens, before it does.
    observe: Callable[[Rows, Ragged], None] = field(default=lambda rows, advantages: None)
    rollout_is_exact: bool = False  # generation finds the numbers of training, but for rounding: `is_own`


Controller = Callable[[Setup], Iterator[Metrics]]
_OfGroups = Callable[[Tensor, Tensor], Tensor]  # (rewards, groups) -> advantages, (R) each


def of_groups(setup: Setup, estimate: _OfGroups) -> Iterator[Metrics]:
    """GRPO, Dr. GRPO, GSPO and RLOO: a response against the others to its prompt."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        estimated = estimate(outcomes_of(setup, rows), rows.tensor("groups"))
        yield learned(setup, rows, rows.ragged("old").spread(estimated.float()))


def reinforce_pp(setup: Setup) -> Iterator[Metrics]:
    """REINFORCE++: whitened rewards to go, a response a prompt."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        yield learned(setup, rows, advantages.reinforce_pp(by_token, gamma=setup.algorithm.gamma))


def reinforce_pp_baseline(setup: Setup) -> Iterator[Metrics]:
    """REINFORCE++ with the mean of the group as a baseline."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        outcomes, groups = outcomes_of(setup, rows), rows.tensor("groups")
        yield learned(setup, rows, advantages.reinforce_pp_baseline(outcomes, groups, rows.ragged("old")))


def remax(setup: Setup) -> Iterator[Metrics]:
    """ReMax: a response against the likeliest one to its prompt, which the stream draws beside it."""
    while True:
        both = rewarded(setup, drawn(setup))
        is_greedy = both.tensor("greedy")
        rows, greedy = scored(setup, both.take(~is_greedy)), both.take(is_greedy)
        baseline = dict(zip(greedy.tensor("groups").tolist(), greedy.tensor("reward").tolist(), strict=True))
        of_greedy = torch.tensor([baseline[group] for group in rows.tensor("groups").tolist()])
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        yield learned(setup, rows, advantages.remax(by_token, of_greedy))


def dapo(setup: Setup) -> Iterator[Metrics]:
    """DAPO and CISPO: groups whose rewards are all equal leave, and others are drawn until the batch is full."""
    while True:
        kept, rewards, rounds, num, tokens = list[Rows](), list[Tensor](), 0, 0, 0
        while num < setup.sizes.prompts * setup.sizes.responses and rounds < _MOST_ROUNDS:
            rows, rounds = overlong(setup, rewarded(setup, drawn(setup))), rounds + 1
            tokens += sum(len(rows.ragged(name).values) for name in _TEXTS)
            rewards.append(rows.tensor("reward").double())
            kept.append(rows.take(~advantages.is_degenerate(rows.tensor("reward"), rows.tensor("groups"))))
            num += len(kept[-1])
        rows = cat(kept).take(range(min(num, setup.sizes.prompts * setup.sizes.responses)))
        found: Metrics = {"group/rounds": float(rounds), "group/kept": float(len(rows)), "group/tokens": float(tokens)}
        # Groups that stay are neither all right nor all wrong, so their mean reward says little about the policy.
        found["group/reward"] = float(torch.cat(rewards).mean())
        if len(rows):
            rows = scored(setup, rows)
            estimated = advantages.grpo(outcomes_of(setup, rows), rows.tensor("groups"))
            found |= learned(setup, rows, rows.ragged("old").spread(estimated.float()))
        else:
            setup.progress.step += 1
        yield found


def ppo(setup: Setup) -> Iterator[Metrics]:
    """PPO: a critic's values, generalised advantages, whitened."""
    while True:
        rows = scored(setup, rewarded(setup, drawn(setup)))
        by_token = token_rewards(rows.tensor("reward"), kl_of(rows), in_rewards(setup))
        values = setup.roles.critic.values(only(rows, *_TEXTS)).ragged("values")
        estimated, returns = advantages.gae(by_token, values, gamma=setup.algorithm.gamma, lam=setup.algorithm.lam)
        found = fitted_values(setup, setup.roles.critic, rows, values, returns)
        yield found | learned(setup, rows, advantages.whiten(estimated))


def safe_rlhf(setup: Setup) -> Iterator[Metrics]:
    """Safe RLHF: PPO for reward less multiplier x cost, each with its critic; half of the KL is in each."""
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
            values = critic.values(only(rows, *_TEXTS)).ragged("values")
            own, returns = advantages.gae(by_token, values, gamma=gamma, lam=lam)
            prefix = "critic" if name == "reward" else "cost_critic"
            found |= fitted_values(setup, critic, rows, values, returns, prefix)
            estimated[name] = advantages.whiten(own)
        yield found | learned(setup, rows, mixed(estimated["reward"], estimated["cost"], multiplier.value))


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
}


def drawn(setup: Setup) -> Rows:
    """The next prompts with responses of the actor, with weights that are as old as the stream allows."""
    return setup.stream.next(setup.progress.step)


def rewarded(setup: Setup, rows: Rows) -> Rows:
    """With `reward`, the weighted sum of all rewards, and each of them as `score/NUMBER` where there are several."""
    parts = [(weight, role.rewards(rows).tensor("reward")) for weight, role in setup.roles.rewards]
    total = torch.stack([weight * part for weight, part in parts]).sum(0)
    several = {f"score/{number}": part for number, (_, part) in enumerate(parts)} if len(parts) > 1 else {}
    return rows | Rows({"reward": total, **several})


def overlong(setup: Setup, rows: Rows) -> Rows:
    """With DAPO's penalty for long responses in the rewards."""
    window, longest = setup.algorithm.overlong_window, setup.sizes.num_tokens
    if not window:
        return rows
    penalty = advantages.overlong_penalty(rows.ragged("responses").lengths, max_length=longest, window=window)
    return rows.drop("reward") | Rows({"reward": rows.tensor("reward") + penalty.float()})


def scored(setup: Setup, rows: Rows) -> Rows:
    """With log-probabilities `old` of the present policy and, if there is a reference, its own and `kl` by token."""
    texts = only(rows, *_TEXTS)
    of_policy = Rows({"old": rows.ragged("rollout")}) if is_own(setup, rows) else setup.roles.actor.logprobs(texts)
    rows = rows | of_policy
    if setup.roles.reference is None:
        return rows
    rows = rows | setup.roles.reference.logprobs(texts)
    old, of_reference = rows.ragged("old"), rows.ragged("reference")
    estimator = setup.algorithm.kl_estimator if setup.algorithm.kl == "reward" else "k1"
    return rows | Rows({"kl": old.with_values(estimates(old.values, of_reference.values, estimator))})


def is_own(setup: Setup, rows: Rows) -> bool:
    """Whether what drew the rows is the present policy, so that their log-probabilities `rollout` are its own.

    They are then not computed again; the first update of the step, which finds them anyway, compares.
    """
    return setup.rollout_is_exact and bool((rows.ragged("versions").values == setup.progress.step).all())


def only(rows: Rows, *names: str) -> Rows:
    """These columns alone: what a call does not read need not travel."""
    return Rows({name: rows.columns[name] for name in names})


def kl_of(rows: Rows) -> Ragged:
    """KL by token; 0 without a reference, whose coefficient then is 0."""
    if "kl" in rows.columns:
        return rows.ragged("kl")
    return rows.ragged("old").with_values(torch.zeros_like(rows.ragged("old").values))


def in_rewards(setup: Setup) -> float:
    """The coefficient of KL in rewards: 0 where KL counts in the loss, which `learned` sees to."""
    return setup.progress.kl_coefficient if setup.algorithm.kl == "reward" else 0.0


def outcomes_of(setup: Setup, rows: Rows) -> Tensor:
    """Rewards of responses, less their KL where it counts there, for algorithms without token rewards."""
    outcomes, coefficient = rows.tensor("reward"), in_rewards(setup)
    return penalised(outcomes, rows.ragged("kl"), coefficient) if coefficient else outcomes


def learned(setup: Setup, rows: Rows, estimated: Ragged) -> Metrics:
    """Update the actor with advantages of tokens, and the progress; the numbers of the step."""
    progress, algorithm = setup.progress, setup.algorithm
    setup.observe(rows, estimated)
    compares = is_own(setup, rows)
    found = of_rows(rows.drop("old") if compares else rows, setup.sizes.num_tokens)
    found |= of_tokens("advantages", estimated) | lags(rows, progress.step)
    columns = {"old": rows.ragged("old"), "advantages": estimated.with_values(estimated.values.float())}
    if algorithm.kl == "loss" and progress.kl_coefficient:
        weight = torch.full_like(estimated.values, progress.kl_coefficient, dtype=torch.float32)
        columns |= {"reference": rows.ragged("reference"), "kl_weight": estimated.with_values(weight)}
    if algorithm.importance_bound is not None:
        ratios = token_ratios(rows.ragged("old"), rows.ragged("rollout"))
        columns["importance"] = truncated(ratios, algorithm.importance_bound)
    if compares:
        columns["rollout"] = rows.ragged("rollout")
    lr, names, updates = setup.lr(progress.step), tuple(columns), list[dict[str, float]]()
    for part in mini_batches(setup, only(rows, *_TEXTS) | Rows(columns)):
        updates.append(setup.roles.actor.update(part, lr=lr, columns=names))
        # Later updates are on another policy than the one that drew.
        names = tuple(name for name in names if name != "rollout")
    found |= {name: updates[0].pop(name) for name in ROLLOUT if name in updates[0]}
    found |= joined(updates, "actor") | {"actor/kl_coef": progress.kl_coefficient}
    if algorithm.kl_target is not None:
        kl = float(rows.ragged("kl").sums().mean())
        target, horizon = algorithm.kl_target, algorithm.kl_horizon
        progress.kl_coefficient = adapted(progress.kl_coefficient, kl, len(rows), target=target, horizon=horizon)
    progress.step += 1
    progress.updates += len(updates)
    return found


def fitted_values(
    setup: Setup, critic: Any, rows: Rows, values: Ragged, returns: Ragged, prefix: str = "critic"
) -> Metrics:
    """Update a critic with returns of tokens; its numbers."""
    wanted = Rows({"old_values": values, "returns": returns.with_values(returns.values.float())})
    whole = only(rows, *_TEXTS) | wanted
    lr = setup.critic_lr(setup.progress.step)
    updates = [critic.update(part, lr=lr) for part in mini_batches(setup, whole)]
    error, spread = (returns.values - values.values).double().var(), returns.values.double().var()
    means = {
        f"{prefix}/values/mean": float(values.values.mean()),
        f"{prefix}/returns/mean": float(returns.values.mean()),
    }
    explained = float(1 - error / spread) if float(spread) > 0 else 0.0
    return joined(updates, prefix) | means | {f"{prefix}/vf_explained_var": explained}


def mini_batches(setup: Setup, rows: Rows) -> Iterator[Rows]:
    """`rows` in mini-batches, as often as there are epochs; the last of each is smaller where rows run out."""
    size = setup.sizes.mini_batch
    sizes = [min(size, len(rows) - first) for first in range(0, len(rows), size)]
    for _ in range(setup.sizes.epochs):
        yield from rows.split(sizes)
