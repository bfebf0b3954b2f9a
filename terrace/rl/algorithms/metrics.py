"""Metrics of an iteration, computed from its rows, under verl's names."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from terrace.rl.algorithms.advantages import is_degenerate
from terrace.rl.values.ragged import Ragged
from terrace.rl.values.rows import ROUTES, Rows

Metrics = dict[str, float]
ROLLOUT = ("rollout/logprob_diff_max", "rollout/logprob_diff_mean", "rollout/k3", "rollout/ess")


def of_rows(rows: Rows, num_tokens: int) -> Metrics:
    """Metrics of rewards, lengths and groups, and of the difference between rollout and training.

    `num_tokens` is the longest response that may be sampled. A group of equal rewards counts as all right if the reward
    is above 0, else as all wrong.
    """
    lengths, prompts = rows.ragged("responses").lengths.double(), rows.ragged("prompts").lengths.double()
    rewards, groups = rows.tensor("reward").double(), rows.tensor("groups")
    found = {
        **_summary("reward", rewards, ("mean", "std", "max", "min")),
        **_summary("response_length", lengths, ("mean", "max", "min")),
        "response_length/clip_ratio": float((lengths >= num_tokens).double().mean()),
        **_summary("prompt_length", prompts, ("mean", "max", "min")),
    }
    for name in rows.columns:
        if name.startswith("score/"):
            found[f"{name}/mean"] = float(rows.tensor(name).double().mean())
    equal = is_degenerate(rewards, groups)
    if bool((groups[1:] == groups[:-1]).any()):
        found["group/all_right"] = _share(equal & (rewards > 0))
        found["group/all_wrong"] = _share(equal & (rewards <= 0))
    if ROUTES in rows.columns:
        found["rollout/route_bytes"] = float(rows.ragged(ROUTES).values.nbytes)
    if "old" in rows.columns:
        found |= _rollout(rows.ragged("old"), rows.ragged("rollout"))
    if "kl" in rows.columns:
        found["actor/kl"] = _mean(rows.ragged("kl").values)
    return found | (of_environments(rows) if "emitted" in rows.columns else {})


def of_environments(rows: Rows) -> Metrics:
    """Metrics of turns and answers: means over the responses of `rows`, shares, and seconds.

    `environment/s` is spent in the environment of a response; `environment/stalled_s` is the sum of the seconds in
    which replicas stood still.
    """
    finish, calls = rows.objects("finish"), float(rows.tensor("calls").sum())
    found = {
        **_summary("environment/turns", rows.tensor("turns"), ("mean", "max")),
        "environment/foreign_tokens": 1 - _share(rows.ragged("emitted").values),
        "environment/calls": _mean(rows.tensor("calls")),
        "environment/s": _mean(rows.tensor("environment_s")),
        "environment/stalled_s": float(rows.tensor("stalled_s").sum()),
    }
    found |= {f"environment/ended_by_{why}": finish.count(why) / max(1, len(finish)) for why in ("length", "turns")}
    return found | ({"environment/calls_read": float(rows.tensor("calls_read").sum()) / calls} if calls else {})


def of_tokens(prefix: str, values: Ragged) -> Metrics:
    """Mean, maximum and minimum of a token column."""
    return _summary(prefix, values.values.double(), ("mean", "max", "min"))


def joined(parts: Iterable[Mapping[str, float]], prefix: str) -> Metrics:
    """The mean of each metric over the updates of an iteration, with `prefix` before its name."""
    lists: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            lists.setdefault(f"{prefix}/{name}", []).append(value)
    return {name: sum(values) / len(values) for name, values in lists.items()}


class Sums:
    """Sums over the tokens of a step, by name; of a name that ends in `_max` the maximum. "tokens" counts the tokens.

    Numbers stay on the device until they are read, by one copy, so that no micro-batch waits for it.
    """

    def __init__(self) -> None:
        self._numbers: list[tuple[str, Tensor | float]] = []

    def add(self, name: str, number: Tensor | float) -> None:
        self._numbers.append((name, number))

    def clear(self) -> None:
        self._numbers.clear()

    def read(self) -> Metrics:
        """The sums since the last `clear`."""
        tensors = [number.detach().double() for _, number in self._numbers if isinstance(number, Tensor)]
        read, found = iter(torch.stack(tensors).tolist() if tensors else ()), dict[str, float]()
        for name, number in self._numbers:
            value, before = next(read) if isinstance(number, Tensor) else number, found.get(name, 0.0)
            found[name] = max(before, value) if name.endswith("_max") else before + value
        return found


def rollout_sums(logprobs: Ragged, rollout: Ragged) -> dict[str, Tensor | float]:
    """Sums that compare training's `logprobs` with the `rollout`'s; add those of several batches to get the total.

    Names that end in `_max` are maxima instead. `rollout_numbers` turns the totals into metrics.
    """
    difference = logprobs.values.double() - rollout.values.double()
    ratios = logprobs.with_values(difference).sums().exp()
    return {
        "rollout/logprob_diff_max": difference.abs().max() if len(difference) else 0.0,
        "rollout/logprob_diff_mean": difference.abs().sum(),
        "rollout/k3": (difference.exp() - 1 - difference).sum(),
        "rollout/weights": ratios.sum(),
        "rollout/squares": ratios.square().sum(),
        "rollout/responses": float(len(ratios)),
    }


def rollout_numbers(means: Metrics) -> Metrics:
    """The metrics `ROLLOUT` from totals of `rollout_sums` that were divided by the token count, except the maximum."""
    found = {name: means[name] for name in ROLLOUT if name in means}
    # Effective sample size of the weights of responses (Kong 1992): 1 where rollout and training agree.
    spread = means["rollout/squares"] * means["rollout/responses"]
    return found | {"rollout/ess": means["rollout/weights"] ** 2 / spread if spread else 1.0}


def _rollout(logprobs: Ragged, rollout: Ragged) -> Metrics:
    if not len(logprobs.values):
        return {"rollout/logprob_diff_max": 0.0, "rollout/logprob_diff_mean": 0.0}
    total = rollout_sums(logprobs, rollout)
    num = {name: 1 if name.endswith("_max") else len(logprobs.values) for name in total}
    return rollout_numbers({name: float(value) / num[name] for name, value in total.items()})


def _summary(prefix: str, values: Tensor, kinds: Iterable[str]) -> Metrics:
    if not len(values):
        return {f"{prefix}/{kind}": 0.0 for kind in kinds}
    deviation = values.std() if len(values) > 1 else torch.zeros(())
    all_kinds = {"mean": values.mean(), "std": deviation, "max": values.max(), "min": values.min()}
    return {f"{prefix}/{kind}": float(all_kinds[kind]) for kind in kinds}


def _share(mask: Tensor) -> float:
    return float(mask.double().mean())


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0
