"""The parts of a step that controllers share: drawing, scoring, and updates of the roles that learn."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from terrace.rl.algorithms import advantages
from terrace.rl.algorithms.importance import token_ratios, truncated
from terrace.rl.algorithms.kl import adapted, estimates, penalised
from terrace.rl.algorithms.metrics import ROLLOUT, Metrics, joined, of_rows, of_tokens
from terrace.rl.controllers.setup import Setup
from terrace.rl.stream.stream import lags
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import ROUTES, Rows

TEXTS = ("prompts", "responses", "emitted")  # `emitted` only where environments answer
EARNED = "earned"  # column of the rewards that environments gave


def drawn(setup: Setup) -> Rows:
    """The next prompts with their responses, from weights that are at most as old as the stream allows."""
    return setup.stream.next(setup.progress.step)


def rewarded(setup: Setup, rows: Rows) -> Rows:
    """Add `reward`, the weighted sum of all rewards, 0 without any; and each as `score/NUMBER` if there are several.

    What an environment gave is the last of them, with a weight of 1.
    """
    parts = [(weight, role.rewards(rows).tensor("reward")) for weight, role in setup.roles.rewards]
    parts += [(1.0, rows.tensor(EARNED).float())] if EARNED in rows.columns else []
    total = torch.stack([torch.zeros(len(rows)), *(weight * part for weight, part in parts)]).sum(0)
    several = {f"score/{number}": part for number, (_, part) in enumerate(parts)} if len(parts) > 1 else {}
    return rows | Rows({"reward": total, **several})


def overlong(setup: Setup, rows: Rows) -> Rows:
    """Add DAPO's penalty for long responses to `reward`."""
    window, longest = setup.algorithm.overlong_window, setup.sizes.num_tokens
    if not window:
        return rows
    penalty = advantages.overlong_penalty(rows.ragged("responses").lengths, max_length=longest, window=window)
    return rows.drop("reward") | Rows({"reward": rows.tensor("reward") + penalty.float()})


def scored(setup: Setup, rows: Rows) -> Rows:
    """Add the current policy's log-probabilities `old` and, if there is a reference, its `reference` and token `kl`."""
    texts = texts_of(rows)
    of_policy = Rows({"old": rows.ragged("rollout")}) if is_own(setup, rows) else setup.roles.actor.logprobs(texts)
    rows = rows | of_policy
    if setup.roles.reference is None:
        return rows
    rows = rows | setup.roles.reference.logprobs(texts)
    old, of_reference = rows.ragged("old"), rows.ragged("reference")
    estimator = setup.algorithm.kl_estimator if setup.algorithm.kl == "reward" else "k1"
    return rows | Rows({"kl": old.with_values(estimates(old.values, of_reference.values, estimator))})


def is_own(setup: Setup, rows: Rows) -> bool:
    """Whether the current policy drew all rows and generation is exact, so that `rollout` serves as `old`.

    No separate scoring pass is then needed; the step's first update computes the log-probabilities anyway and compares.
    """
    return setup.rollout_is_exact and bool((rows.ragged("versions").values == setup.progress.step).all())


def texts_of(rows: Rows) -> Rows:
    """The columns that the actor reads to score or to learn from responses."""
    return only(rows, *TEXTS, *((ROUTES,) if ROUTES in rows.columns else ()))


def only(rows: Rows, *names: str) -> Rows:
    """Select columns, so that a call is not sent those that it does not read; all must be there but `emitted`."""
    return Rows({name: rows.columns[name] for name in names if name != "emitted" or name in rows.columns})


def kl_of(rows: Rows) -> Ragged:
    """KL per token; 0 without a reference, since the coefficient is then 0 as well."""
    if "kl" in rows.columns:
        return rows.ragged("kl")
    return rows.ragged("old").with_values(torch.zeros_like(rows.ragged("old").values))


def in_rewards(setup: Setup) -> float:
    """The KL coefficient in rewards; 0 if KL is part of the loss, which `learned` handles."""
    return setup.progress.kl_coefficient if setup.algorithm.kl == "reward" else 0.0


def outcomes_of(setup: Setup, rows: Rows) -> Tensor:
    """Response rewards, minus the KL penalty if it belongs in the reward, for algorithms without token rewards."""
    outcomes, coefficient = rows.tensor("reward"), in_rewards(setup)
    return penalised(outcomes, rows.ragged("kl"), coefficient) if coefficient else outcomes


def learned(setup: Setup, rows: Rows, estimated: Ragged) -> Metrics:
    """Update the actor with token advantages `estimated`, and the progress. Returns the step's metrics."""
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
    for part in mini_batches(setup, texts_of(rows) | Rows(columns)):
        updates.append(setup.roles.actor.update(part, lr=lr, columns=names))
        # After the first update the policy is no longer the one that drew.
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
    """Update a critic with token returns. Returns its metrics."""
    wanted = Rows({"old_values": values, "returns": returns.with_values(returns.values.float())})
    whole = only(rows, *TEXTS) | wanted
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
    """Yield mini-batches of `rows`, once per epoch; the last of an epoch may be smaller."""
    size = setup.sizes.mini_batch
    sizes = [min(size, len(rows) - first) for first in range(0, len(rows), size)]
    for _ in range(setup.sizes.epochs):
        yield from rows.split(sizes)
