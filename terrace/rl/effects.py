"""Rejects keys of a `terrace rl` run that would have no effect with the other keys as they are.

Keys of plans follow the rules of `terrace train`, and so does what counts as given (terrace.train.effects). Rules
within `[algorithm]` are in its dataclass.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from terrace.base.errors import ConfigError
from terrace.cluster.cluster import Cluster
from terrace.plan.plan import OF_TRAINING, Plan
from terrace.plan.wire import MessageClass
from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.config import RlConfig
from terrace.rl.config_layers import task_table
from terrace.rl.keys import EnvironmentKeys, RewardKeys, RunKeys
from terrace.rl.placing import LEARNING
from terrace.train.effects import PLAN_RULES, PlanRule, refuse_without_effect, value_at, why_no_peak

Rule = Callable[[RlConfig], str]  # returns why a key has no effect and what to do; "" if it has one
_LEAVE = "leave it out"


def _critic_lr(config: RlConfig) -> str:
    if config.algorithm.traits.has_critic:
        return ""
    return f"algorithm.name = {config.algorithm.name!r} has no critic; {_LEAVE}"


def _of_start(config: RlConfig) -> str:
    if config.run.start_steps:
        return ""
    return f"run.start_steps = 0, so the run has no supervised start; {_LEAVE}"


def _of_file(config: RlConfig) -> str:
    if not config.run.task:
        return ""
    return f"run.task = {config.run.task!r} has no file of prompts; {_LEAVE}"


def _reward_timeout(config: RlConfig) -> str:
    if any(each.function for each in config.rewards):
        return ""
    return f"it is for rewards by a function, and there is none; {_LEAVE}"


def _timeout(config: RlConfig) -> str:
    if config.cluster.world_size > 1:
        return ""
    return f"a run on one rank is one process, which waits for no other; {_LEAVE}"


def _warmup_steps(config: RlConfig) -> str:
    return why_no_peak("run", config.run.warmup_steps, config.run.steps)


def _of_ratios(config: RlConfig) -> str:
    run = config.run
    if run.mini_batch < run.prompts * run.responses or run.epochs > 1:
        return ""
    return (
        f"a step is one update (run.mini_batch = {run.mini_batch} = run.prompts x run.responses), and its policy is "
        f"the one that it is compared with; lower run.mini_batch, or {_LEAVE}"
    )


def _overlap(config: RlConfig) -> str:
    if not config.rollout.is_served:
        return ""
    return f"under rollout.engine = 'http' a response goes on as soon as its answer is there; {_LEAVE}"


def _cost_weight(config: RlConfig) -> str:
    return f"the multiplier weighs the cost; {_LEAVE}, or set algorithm.multiplier"


def _of_algorithm(key: str) -> Rule:
    def why(config: RlConfig) -> str:
        own = config.algorithm.without_effect(key).removeprefix("under ")
        return own or (_of_ratios(config) if key in _OF_RATIOS else "")

    return why


def _of_gradients(cluster: Cluster, plan: Plan, num_micros: int) -> str:
    return f"a role that only scores has no gradients and no optimizer; {_LEAVE}"


_OF_TRAINING = (  # keys of a plan
    *OF_TRAINING,
    *(f"wire.{each.value}" for each in (MessageClass.REDUCE, MessageClass.SYNC, MessageClass.ORTHOGONALISE)),
)
_OF_RATIOS = ("clip_low", "clip_high", "dual_clip", "value_clip")
RULES: dict[str, Rule] = {
    "run.critic_lr": _critic_lr,
    **dict.fromkeys(("run.start_batch", "run.start_lr"), _of_start),
    **dict.fromkeys(("run.held_out", "run.prompt_column"), _of_file),
    "run.reward_timeout_s": _reward_timeout,
    "run.warmup_steps": _warmup_steps,
    "cost.weight": _cost_weight,
    "environment.overlap": _overlap,
    **{f"algorithm.{item.name}": _of_algorithm(item.name) for item in fields(Algorithm)},
}
# Checked only for keys on the command line, as are keys of training in the plan of a role that only scores: a file may
# also serve runs on several ranks, and a plan several roles.
ASKED: dict[str, Rule] = {"run.timeout_s": _timeout}
_OWNERS: dict[str, type[Any]] = {
    "run": RunKeys,
    "cost": RewardKeys,
    "environment": EnvironmentKeys,
    "algorithm": Algorithm,
    "plan": Plan,
    "plans": Plan,
}


def check_effects(
    config: RlConfig, table: Mapping[str, Any], overrides: Mapping[str, Any], *, has_timeouts: bool = False
) -> None:
    """Raise `ConfigError` for the first key of a run without effect.

    Keys of `table`, the whole run, are checked if their value is not the default, keys of `overrides` always.
    `has_timeouts`: calls have timeouts even on one rank, as under Ray.
    """
    own = {role for each in (table, overrides) for role in each.get("plans", {})}
    rules = dict(RULES)
    shared = [role for role, has_engine in config.roles.items() if has_engine and role not in own]
    for key in overrides.get("plan", {}) if not shared else ():
        raise ConfigError(
            f"plan.{key} has no effect: every role has a plan of its own in [plans]; leave one of them out"
        )
    for key, rule in PLAN_RULES.items():
        rules[f"plan.{key}"] = _of_plans(shared, rule)
        rules |= {f"plans.{role}.{key}": _of_plans([role], rule) for role in own}
    task = task_table(config.run.task) if config.run.task else {}
    silent = {name: [*_defaults(config, name), value_at(task, name)] for name in rules}
    refuse_without_effect(rules, config, table, overrides, silent)
    asked = {} if has_timeouts else dict(ASKED)
    for role in own - {*LEARNING}:
        asked |= {f"plans.{role}.{key}": _of_plans([role], _of_gradients) for key in _OF_TRAINING}
    refuse_without_effect(asked, config, {}, overrides, {})


def _defaults(config: RlConfig, name: str) -> list[Any]:
    head, _, key = name.partition(".")
    key = key.rpartition(".")[2]
    found = [item.default for item in fields(_OWNERS[head]) if item.name == key]
    return [*found, config.algorithm.traits.paper.get(key)] if head == "algorithm" else found


def _of_plans(roles: list[str], rule: PlanRule) -> Rule:
    def why(config: RlConfig) -> str:
        found = list[str]()
        for role in roles:
            num_micros = config.num_micros(config.run.mini_batch, role)
            found.append(rule(config.places[role].cluster, config.plan_of(role), num_micros))
        # In a plan of several roles, a key needs an effect on only one of them.
        return found[0] if found and all(found) else ""

    return why
