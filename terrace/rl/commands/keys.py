"""The keys of a run of `terrace rl`, as `terrace keys` lists them."""

import json
from typing import Any

from terrace.base.products import Keys
from terrace.rl.algorithms.algorithm import TRAITS, Algorithm
from terrace.rl.config_layers import task_table
from terrace.rl.keys import TASKS, EnvironmentKeys, RewardKeys, RunKeys
from terrace.rl.placing import PoolKeys
from terrace.rl.rates import USUAL
from terrace.rl.workers.servers import RolloutKeys
from terrace.train.effects import value_at
from terrace.train.rates import usual_rate

_SECTIONS = {
    "run": RunKeys,
    "algorithm": Algorithm,
    "reward": RewardKeys,
    "environment": EnvironmentKeys,
    "cost": RewardKeys,
    "rollout": RolloutKeys,
    "pool": PoolKeys,
}
_SHARED = ("optimizer", "plan")


def _defaults(section: str, name: str, default: Any) -> list[str]:
    key, found = f"{section}.{name}", list[str]()
    if key in USUAL:
        found.append(
            f"{usual_rate('adamw', USUAL[key]):g} {'in terrace rl' if section in _SHARED else 'on loaded weights'}"
        )
    if section == "algorithm":
        papers: dict[str, list[str]] = {}
        for paper, traits in TRAITS.items():
            if name in traits.paper:
                papers.setdefault(json.dumps(traits.paper[name]), []).append(paper)
        found += [f"{value} for {', '.join(names)}" for value, names in papers.items()]
    for task in TASKS if section in (*_SECTIONS, *_SHARED) else ():
        value = value_at(task_table(task), key)
        found += [f"{json.dumps(value)} of --task {task}"] if value is not None and value != default else []
    return found


KEYS = Keys(
    command="rl",
    sections=_SECTIONS,
    shared=_SHARED,
    lists=("reward", "pool"),
    tables={"plans": "plan"},
    words={
        "run": "of terrace rl",
        "algorithm": "of terrace rl",
        "reward": "of terrace rl; [[reward]] again for another",
        "environment": "of terrace rl, for responses of many turns",
        "cost": "of terrace rl, for safe-rlhf",
        "rollout": "of terrace rl, for responses by vLLM or SGLang",
        "pool": "of terrace rl; [[pool]] for each",
        "plans": "of terrace rl: plans.ROLE has the keys of [plan], or is the name of a plan; ROLE is actor, "
        "reference, critic, cost_critic, cost or reward_0",
    },
    defaults=_defaults,
)
