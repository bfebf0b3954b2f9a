"""Learning rates of a feedback run that loads weights, with the defaults and bounds of `terrace train`.

The actor, the critics and a supervised start begin from the loaded weights, each with its own rate. Usual for AdamW are
1e-6 for a policy (GRPO in DeepSeekMath, Shao et al. 2402.03300, section 4.2), and 1e-5 for a critic that begins as a
copy of the policy (the default of verl, `critic.optim.lr`).
"""

from collections.abc import Mapping
from typing import Any

from terrace.rl.algorithms.algorithm import TRAITS, Algorithm
from terrace.rl.config import RlConfig
from terrace.train.rates import ADAMW, LoadedRate, check_rates, usual_rate

USUAL = {"optimizer.lr": 1e-6, "run.critic_lr": 1e-5, "run.start_lr": ADAMW["next-token"]}
_OF = {"run.critic_lr": " of critics", "run.start_lr": " of the supervised start"}


def with_rates(table: Mapping[str, Any], given: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """`table` with default rates for loaded weights, for each rate that is not in `given` (by section)."""
    found = dict(table)
    optimizer = table.get("optimizer", {})
    if not table.get("weights") or not isinstance(optimizer, Mapping):
        return found
    for name in USUAL:
        section, _, key = name.partition(".")
        rate = usual_rate(str(optimizer.get("name", "adamw")), USUAL[name])
        own = found.get(section, {})
        if rate is not None and key not in given.get(section, {}) and isinstance(own, Mapping) and _learns(name, table):
            found[section] = {**own, key: rate}
    return found


def _learns(name: str, table: Mapping[str, Any]) -> bool:
    run, algorithm = table.get("run"), table.get("algorithm", {})
    if name == "run.start_lr":
        return isinstance(run, Mapping) and bool(run.get("start_steps"))
    if name == "run.critic_lr":
        chosen = algorithm.get("name", Algorithm.name) if isinstance(algorithm, Mapping) else None
        return isinstance(chosen, str) and chosen in TRAITS and TRAITS[chosen].has_critic
    return True


def check_loaded_rates(config: RlConfig) -> None:
    """Raise `ConfigError` for a rate that would destroy loaded weights, or for a `run.high_lr` without effect."""
    rates = loaded_rates(config)
    check_rates(rates, "run.high_lr", is_allowed=config.run.high_lr, lr=config.optimizer.lr)


def loaded_rates(config: RlConfig) -> list[LoadedRate]:
    """The rates that apply to loaded weights; empty for a run from random weights."""
    if not config.weights:
        return []
    return [
        LoadedRate(key=name, lr=lr, optimizer=config.optimizer.name, adamw=USUAL[name], of=_OF.get(name, ""))
        for name, lr in _rates(config).items()
    ]


def rate_lines(config: RlConfig) -> list[str]:
    """A line for each rate of a run, compared with the usual rate if weights are loaded."""
    by_key = {each.key: each.words for each in loaded_rates(config)}
    return [
        by_key.get(name) or f"peak learning rate{_OF.get(name, '')} {lr:g} (--{name})"
        for name, lr in _rates(config).items()
    ]


def _rates(config: RlConfig) -> dict[str, float]:
    run = config.run
    found = {"optimizer.lr": config.optimizer.lr}
    found |= {"run.critic_lr": run.critic_lr} if config.algorithm.traits.has_critic else {}
    return found | ({"run.start_lr": run.start_lr} if run.start_steps else {})
