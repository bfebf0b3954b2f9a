"""Whether every algorithm learns the task `sort`, against bars, each from the same supervised start in one process.

    python -m bench.rl_learning [NAME ...] [--seed 0]

NAME is an algorithm, `shuffled` (GRPO whose rewards are dealt out anew, which must teach nothing) or `all`. Bars are of
the reward of drawn responses, the mean of the last five steps, and of the likeliest ones to held-out prompts.
"""

import argparse
import random
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from terrace.base.schema import merge
from terrace.rl.config import resolve
from terrace.rl.making import started
from terrace.rl.metrics import Metrics
from terrace.rl.prompts import Sample
from terrace.rl.run import START, RunInputs
from terrace.rl.runtime import InlineRuntime
from terrace.rl.sort_task import END, SortPrompts, SortTokenizer, reward

_LAST = 5  # steps, whose rewards are averaged: one of 64 prompts has a standard error of .04
_ALONE: dict[str, Any] = {
    "cluster": {"tiers": {name: {"size": 1} for name in ("package", "node", "system")}},
    "plan": {"mapping": {"system": {"pipeline": 1}}, "schedule": None, "micro_batch": 128},
    "run": {"rows": 1},
}
_SINGLE = {"run": {"prompts": 512, "responses": 1}}  # one response a prompt


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
    "remax": Bar(20, keys=_SINGLE),
    "dapo": Bar(20),
    "gspo": Bar(20, keys={"algorithm": {"clip_low": 0.2, "clip_high": 0.2}}),
    "cispo": Bar(20),
    "ppo": Bar(20),
    "shuffled": Bar(20),
}


def shuffled(samples: Sequence[Sample]) -> list[float]:
    """The rewards of the task, dealt out anew: their mean stays."""
    found = reward(samples)
    random.Random(len(samples)).shuffle(found)
    return found


def learned(name: str, bar: Bar, seed: int, folder: Path) -> list[Metrics]:
    """The numbers of all steps; the first has those of the start as `start/reward`."""
    algorithm = "grpo" if name == "shuffled" else name
    keys = merge(_ALONE, {"run": {"steps": bar.steps, "seed": seed}, "algorithm": {"name": algorithm}})
    if name == "shuffled":
        keys = merge(keys, {"reward": [{"function": "bench.rl_learning:shuffled"}]})
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


_SHOWN = ("reward/mean", "actor/kl", "actor/entropy", "actor/pg_clipfrac", "val/reward", "time/step")


def verdict(name: str, bar: Bar, found: list[Metrics]) -> tuple[bool, str]:
    """Whether a case is above its bar, and its figures in words."""
    sampled = sum(step["reward/mean"] for step in found[-_LAST:]) / len(found[-_LAST:])
    greedy, start = found[-1]["val/reward"], found[0]["start/reward"]
    passed = sampled >= bar.sampled and (bar.greedy is None or greedy >= bar.greedy)
    if name == "shuffled":
        passed = greedy <= start
    figures = f"sampled {found[0]['reward/mean']:.3f} to {sampled:.3f}, greedy {start:.3f} to {greedy:.3f}"
    worst = max(step["rollout/logprob_diff_max"] for step in found)
    return passed, f"{name}: {figures}, rollout diff {worst:.1e}: {'passed' if passed else 'FAILED'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=["grpo"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="folder that keeps the supervised start (default: made anew)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = list(BARS) if options.names == ["all"] else options.names
    said, failed = list[str](), False
    with TemporaryDirectory() as made:
        start = (options.start or Path(made)) / f"seed-{options.seed}"
        for name in names:
            folder = Path(made) / name
            folder.mkdir()
            if start.exists():
                shutil.copytree(start, folder / START)
            passed, words = verdict(name, BARS[name], learned(name, BARS[name], options.seed, folder))
            if not start.exists():
                shutil.copytree(folder / START, start)
            said, failed = [*said, words], failed or not passed
            print(words, flush=True)
    print("\n".join(said))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
