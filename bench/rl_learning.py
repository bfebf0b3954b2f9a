"""Whether every algorithm learns the task `sort`, against bars, each from the same supervised start in one process.

    python -m bench.rl_learning [NAME ...] [--seed 0]

`distill` has no reward: it learns from a policy of a longer start. Its KL to that policy, the mean of the last five
steps, must be a fifth below that of the first.

NAME is an algorithm, `shuffled` (GRPO whose rewards are dealt out anew, which must teach nothing), `unconstrained` (PPO
beside which Safe RLHF is judged) or `all`. Bars are of the reward of drawn responses, the mean of the last five steps,
and of the likeliest ones to held-out prompts. Responses that DAPO and CISPO draw and do not learn from count as well.

Algorithms have the numbers of their papers, and all the rate of GRPO except those in `BARS`.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from terrace.base.schema import merge
from terrace.rl.algorithms.metrics import Metrics
from terrace.rl.calls.inline import InlineRuntime
from terrace.rl.commands.run import run as run_whole
from terrace.rl.making import started
from terrace.rl.resolve import resolve
from terrace.rl.run import START, RunInputs
from terrace.rl.sort_task import END, LONGEST, SortPrompts, SortTokenizer, reward
from terrace.rl.values.prompts import Sample

_LAST = 5  # steps, whose rewards are averaged: one of 64 prompts has a standard error of .04
_ALONE: dict[str, Any] = {
    "cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}},
    "plan": {"mapping": {"system": {"pipeline": 1}}, "schedule": None, "micro_batch": 128},
    "run": {"rows": 1},
}
_SINGLE = {"run": {"prompts": 512, "responses": 1}}  # one response a prompt
# The rate rises for 3 steps of the 20, rather than for 10: ReMax and CISPO are the slowest at small rates.
_SHORT_RAMP = {"run": {"warmup_steps": 3}}
_CONSTRAINED: dict[str, Any] = {
    **_SINGLE,
    # Right responses cost .75 on average. The multiplier begins low, and reaches its level within the steps there are.
    "algorithm": {"cost_threshold": 0.7, "multiplier": 0.2, "multiplier_rate": 10.0},
    "cost": {"function": "terrace.rl.sort_task:length_cost"},
}
_MOST_LOST = 0.15  # of the reward, to the constraint


@dataclass(frozen=True)
class Bar:
    """A case: keys of its run, its steps, and the least it must reach."""

    steps: int
    sampled: float = 0.36
    greedy: float | None = None
    keys: dict[str, Any] = field(default_factory=dict)


BARS = {
    "grpo": Bar(40, 0.45, 0.66),
    "dr-grpo": Bar(20),
    "rloo": Bar(20),
    "reinforce++": Bar(20, keys=_SINGLE),
    "reinforce++-baseline": Bar(20),
    "remax": Bar(20, keys=merge(_SINGLE, _SHORT_RAMP)),
    "dapo": Bar(20),
    "gspo": Bar(20),
    "cispo": Bar(20, keys=_SHORT_RAMP),
    "ppo": Bar(20),
    "shuffled": Bar(20),
    "unconstrained": Bar(40, keys=_SINGLE),
    "safe-rlhf": Bar(40, keys=_CONSTRAINED),
    "distill": Bar(20, keys={"run": {"warmup_steps": 3, "mini_batch": 64}, "plan": {"micro_batch": 64}}),
}
_TEACHER = {"run": {"seed": 100, "start_steps": 150, "steps": 1}}
_ALGORITHMS = {"shuffled": "grpo", "unconstrained": "ppo"}  # of cases that are named otherwise


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """The rewards of the task, dealt out anew: their mean stays."""
    found = reward(samples)
    random.Random(len(samples)).shuffle(found)
    return found


def learned(name: str, bar: Bar, seed: int, folder: Path) -> list[Metrics]:
    """The numbers of all steps; the first has those of the start as `start/reward`."""
    algorithm = {"name": _ALGORITHMS.get(name, name)}
    keys = merge(_ALONE, {"run": {"steps": bar.steps, "seed": seed}, "algorithm": algorithm})
    if name == "shuffled":
        keys = merge(keys, {"reward": [{"function": "bench.rl_learning:shuffled"}]})
    if name == "distill":
        teacher = folder / "teacher"
        run_whole(resolve("sort", None, {}, merge(_ALONE, _TEACHER)), teacher, None)
        keys = merge(keys, {"run": {"reference": str(teacher)}})
    config = resolve("sort", None, {}, merge(keys, bar.keys))
    task = SortPrompts(seed)
    inputs = RunInputs(
        config=config, prompts=task, tokenizer=SortTokenizer(), stops=frozenset({END}), examples=task.examples
    )
    found = list[Metrics]()
    with InlineRuntime() as runtime:
        run = started(inputs, runtime, folder, print)
        start = run.evaluated()["val/reward"]
        for step, metrics in run.steps():
            found.append({**metrics, "start/reward": start})
            shown = "  ".join(f"{key} {metrics[key]:.3f}" for key in _SHOWN if key in metrics)
            print(f"{name} seed {seed} step {step:3d}  {shown}  cpu {time.process_time():.0f} s", flush=True)
    return found


_SHOWN = (
    "reward/mean",
    "group/reward",
    "safe/cost",
    "safe/lambda",
    "actor/kl",
    "actor/entropy",
    "actor/pg_clipfrac",
    "val/reward",
    "time/step",
)


def drawn_reward(step: Metrics) -> float:
    """Of all responses of a step, kept or not."""
    return step.get("group/reward", step["reward/mean"])


def last(found: list[Metrics], number: Callable[[Metrics], float]) -> float:
    """The mean of a number over the last steps."""
    return sum(map(number, found[-_LAST:])) / len(found[-_LAST:])


def verdict(name: str, bar: Bar, found: list[Metrics]) -> tuple[bool, str]:
    """Whether a case is above its bar, and its figures in words."""
    sampled = last(found, drawn_reward)
    greedy, start = found[-1]["val/reward"], found[0]["start/reward"]
    passed = sampled >= bar.sampled and (bar.greedy is None or greedy >= bar.greedy)
    if name == "shuffled":
        passed = greedy <= start
    if name == "distill":
        first, now = found[0]["actor/kl"], last(found, lambda step: step["actor/kl"])
        return now <= 0.8 * first, f"distill: KL {first:.4f} to {now:.4f}"
    figures = f"sampled {drawn_reward(found[0]):.3f} to {sampled:.3f}, greedy {start:.3f} to {greedy:.3f}"
    worst = max(step["rollout/logprob_diff_max"] for step in found)
    return passed, f"{name}: {figures}, rollout diff {worst:.1e}: {'passed' if passed else 'FAILED'}"


def constrained(found: list[Metrics], unconstrained: list[Metrics]) -> tuple[bool, str]:
    """Whether Safe RLHF keeps a cost that binds below its threshold, at a reward near that of PPO without a cost."""
    cost = last(found, lambda step: step["safe/cost"])
    threshold = cost - last(found, lambda step: step["safe/violation"])
    multipliers = [step["safe/lambda"] for step in found]
    free = last(unconstrained, lambda step: step["response_length/mean"] - 1) / LONGEST
    lost = last(unconstrained, drawn_reward) - last(found, drawn_reward)
    # The multiplier rises, and then settles: it is past its peak, and moves less than it rose.
    peak, moved = max(multipliers), max(multipliers[-_LAST:]) - min(multipliers[-_LAST:])
    has_settled = multipliers[-1] < peak and moved < peak - multipliers[0]
    passed = cost < threshold < free and lost <= _MOST_LOST and has_settled
    words = f"cost {found[0]['safe/cost']:.3f} to {cost:.3f}, threshold {threshold:.3f}, {free:.3f} without"
    words += f"; lambda {multipliers[0]:.2f} to {peak:.2f} to {multipliers[-1]:.2f}; reward lost {lost:.3f}"
    return passed, f"safe-rlhf beside unconstrained: {words}: {'passed' if passed else 'FAILED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["grpo"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder that keeps the supervised start (default: made anew)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(BARS) if options.names == ["all"] else options.names
    said, failed, by_name = list[str](), False, dict[str, list[Metrics]]()
    with TemporaryDirectory() as made:
        start = (options.start or Path(made)) / f"seed-{options.seed}"
        for name in names:
            folder = Path(made) / name
            folder.mkdir()
            if start.exists():
                shutil.copytree(start, folder / START)
            by_name[name] = learned(name, BARS[name], options.seed, folder)
            passed, words = verdict(name, BARS[name], by_name[name])
            if not start.exists():
                shutil.copytree(folder / START, start)
            said, failed = [*said, words], failed or not passed
            print(words, flush=True)
    if {"safe-rlhf", "unconstrained"} <= by_name.keys():
        passed, words = constrained(by_name["safe-rlhf"], by_name["unconstrained"])
        said, failed = [*said, words], failed or not passed
    print("\n".join(said))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
