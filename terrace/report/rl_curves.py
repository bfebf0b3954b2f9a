"""Curves over the steps of a run of `terrace rl`, by verl's names of its numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from terrace.report.run_curves import Curve

Numbers = Mapping[str, float]

# (title, unit, lines by name, whether the axis begins at 0); a curve none of whose numbers a run has is left out.
_CURVES: tuple[tuple[str, str, Mapping[str, str], bool], ...] = (
    ("KL to the reference", "mean of all tokens", {"KL": "actor/kl"}, False),
    ("KL coefficient", "", {"coefficient": "actor/kl_coef"}, True),
    ("Entropy", "nats a token", {"entropy": "actor/entropy"}, True),
    ("Response length", "tokens", {"mean": "response_length/mean", "longest": "response_length/max"}, True),
    ("Responses that were cut", "share", {"cut": "response_length/clip_ratio"}, True),
    ("Clip fraction", "share of tokens", {"actor": "actor/pg_clipfrac", "critic": "critic/vf_clipfrac"}, True),
    ("Largest difference of rollout and training", "log-probability", {"difference": "rollout/logprob_diff_max"}, True),
    ("Groups of equal rewards", "share", {"all right": "group/all_right", "all wrong": "group/all_wrong"}, True),
    ("Lambda", "multiplier of the cost", {"lambda": "safe/lambda"}, True),
    ("Loss of critics", "", {"reward": "critic/vf_loss", "cost": "cost_critic/vf_loss"}, True),
    (
        "Explained variance of critics",
        "1 is all",
        {"reward": "critic/vf_explained_var", "cost": "cost_critic/vf_explained_var"},
        False,
    ),
    ("Age of responses", "steps", {"mean": "sync/version_lag", "oldest": "sync/version_lag_max"}, True),
    ("Gradient norm before clipping", "", {"actor": "actor/grad_norm", "critic": "critic/grad_norm"}, True),
    ("Throughput", "tokens/s over all ranks", {"tokens/s": "perf/tokens_per_s"}, True),
)

_CHANGING = ("KL coefficient", "Age of responses")  # curves that are left out where they are constant


def rl_curves(records: Sequence[Numbers], table: Mapping[str, Any], predicted_s: float) -> list[Curve]:
    """Curves of a run with the settings `table`, whose step takes `predicted_s` as predicted, 0 if nobody knows."""

    def lines(named: Mapping[str, str]) -> dict[str, list[tuple[int, float]]]:
        found = {
            words: [(int(record["step"]), record[name]) for record in records if name in record]
            for words, name in named.items()
        }
        return {words: points for words, points in found.items() if points}

    rewards = {"drawn": "reward/mean", "held out, likeliest": "val/reward"}
    names = _reward_names(table)
    parts = {name: f"score/{number}/mean" for number, name in enumerate(names)}
    threshold = _section(table, "algorithm").get("cost_threshold")
    level = ("allowed", float(threshold)) if isinstance(threshold, (int, float)) else None
    curves = [
        Curve(title="Reward", lines=lines(rewards), smooth=True),
        Curve(title="Parts of the reward", lines=lines(parts), smooth=True),
        Curve(title="Cost", lines=lines({"cost": "safe/cost"}), from_zero=True, smooth=True, level=level),
    ]
    curves += [Curve(title=title, unit=unit, lines=lines(named), from_zero=low) for title, unit, named, low in _CURVES]
    pools = dict.fromkeys(name for record in records for name in record if name.startswith("sync/bubble/"))
    idle = {"all ranks": "sync/bubble"} | {name.rpartition("/")[2].replace("_", " "): name for name in pools}
    curves.append(Curve(title="Time of ranks without a call", unit="share", lines=lines(idle), from_zero=True))
    step = ("predicted", predicted_s) if predicted_s else None
    curves.append(Curve(title="Seconds of a step", lines=lines({"step": "time/step"}), from_zero=True, level=step))
    # A coefficient that nothing changes says nothing, nor does the age of responses where all are new.
    return [curve for curve in curves if curve.lines and not (curve.title in _CHANGING and _is_constant(curve))]


def _reward_names(table: Mapping[str, Any]) -> list[str]:
    rewards = table.get("reward")
    found = [
        str(own.get("function") or Path(str(own.get("model"))).name)
        for own in (rewards if isinstance(rewards, list) else ())
        if isinstance(own, Mapping)
    ]
    # As the run tells samples of equal names apart.
    return [name if found.count(name) == 1 else f"{name} ({number})" for number, name in enumerate(found)]


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def _is_constant(curve: Curve) -> bool:
    return all(len({value for _, value in points}) == 1 for points in curve.lines.values())
