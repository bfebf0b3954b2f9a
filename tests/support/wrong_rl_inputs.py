"""Wrong inputs of `terrace rl`, run in this process: with `--explain`, and as starts that may not come to a process.

`python -m tests.support.wrong_rl_inputs [NUMBER]` prints the table, and every input that ended otherwise than it may.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any
from unittest import mock

from terrace.rl.algorithms.algorithm import Algorithm
from terrace.rl.commands import run as rl_run
from terrace.rl.keys import RewardKeys, RunKeys
from terrace.runtime.settings import OptimizerConfig
from tests.support.rl_runs import write_own
from tests.support.wrong_inputs import BAD, Case, Ended, campaign, ended, table

_KEYS = [
    *(f"run.{item.name}" for item in fields(RunKeys)),
    *(f"algorithm.{item.name}" for item in fields(Algorithm)),
    *(f"optimizer.{item.name}" for item in fields(OptimizerConfig)),
    *(f"cost.{item.name}" for item in fields(RewardKeys)),
    *(f"plan.{name}" for name in ("params", "micro_batch", "unit", "compute", "messages", "mapping", "wire", "outer")),
    *("plans.actor", "plans.critic.params", "plans.rollout", "plans.nobody", "pool", "reward", "weights", "model"),
    *("cluster.tiers.node.size", "cluster.device.memory_bytes", "nothing", "train.steps", "data.path"),
]
# Of a wrong type for most keys, out of range, huge or hostile for the others.
_VALUES = (
    *("abc", "true", "-1", "0", "1.5", "nan", "inf", "-inf", "1e21", "1000000000000000000000", "[]", "{}", "[{}]"),
    *("", "\x1b[2J", "x" * 3000, "/dev/zero", "[1, 'a']", "{ a = 1 }", "1979-05-27"),
)
_WITHOUT_EFFECT = (
    "--algorithm.kl_estimator k2",
    "--algorithm.kl reward",
    "--algorithm.lam 0.95",
    "--algorithm.gamma 0.5",
    "--algorithm.kl_target 0.1",
    "--algorithm.overlong_window 3",
    "--algorithm.name dapo --algorithm.overlong_window 12",
    "--algorithm.name rloo --algorithm.dual_clip 3",
    "--algorithm.multiplier 2",
    "--algorithm.cost_threshold 0.5",
    "--algorithm.clip_low 1.5",
    "--algorithm.name ppo --algorithm.value_clip inf",
    "--algorithm.dual_clip inf",
    "--run.mini_batch 512 --algorithm.clip_high 0.3",
    "--run.mini_batch 512 --algorithm.name ppo --algorithm.value_clip 0.3",
    "--run.critic_lr 1e-4",
    "--run.high_lr true",
    "--run.start_steps 0 --run.start_lr 1e-4",
    "--run.start_steps 0 --run.start_batch 64",
    "--run.held_out 0",
    "--run.prompt_column text",
    "--run.warmup_steps 60",
    "--run.responses 1 --run.mini_batch 64",
    "--algorithm.name gspo --run.responses 1 --run.mini_batch 64",
    "--algorithm.name dapo --run.responses 1 --run.mini_batch 64",
    "--algorithm.name reinforce++ --run.prompts 1 --run.responses 1 --run.mini_batch 1",
    "--plan.sequence_parallel false",
    "--plan ddp --plan.prefetch 2",
    "--plan.unit 7",
    "--plan zero3 --plans.actor zero1",
    "--plans.rollout zero1",
    "--plans.reward_0 zero1",
    "--plan.mapping.node.context 2",
    "--plan.outer diloco",
    "--plan.compute fp16",
    "--optimizer.momentum 0.9",
    "--place auto --plan zero1",
    "--place auto --plan.micro_batch 4",
    "--place auto --run.rows 2",
)
_STARTS = (
    "--ray ray://",
    "--ray ray://127.0.0.1:10001",
    "--ray nowhere",
    "--ray :6379",
    "--ray 127.0.0.1:99999",
    "--ray a/b:1",
    "--ray  ",
    "--resume nowhere",
    "--resume .",
    "--resume . --task sort",
    "--resume . --place auto",
    "--folder /dev/null/x",
    "--folder .",
    "--folder /proc/x",
    "--task soort",
    "--model nowhere",
    "--model nowhere.safetensors",
    "--cluster nowhere",
    "--plan nowhere",
    "--config nowhere",
    "--config .",
    "--ranks 0",
    "--ranks x",
    "positional",
    "--nothing",
    "--run.",
    "--run..steps 3",
    "--run.steps",
    "--cluster dgx-a100",
    "--run.prompts_file p.jsonl",
    "--run.metrics ['nothing']",
)
_FILES = (
    "\x00",
    "run = 3",
    "[run]\nsteps = ",
    "[[run]]\nsteps = 1",
    "reward = 3",
    "reward = [3]",
    "[reward]\nfunction = 'a:b'",
    "[[reward]]\nfunction = 3",
    "[[reward]]\nfunction = 'terrace.rl.sort_task:reward'\nweight = 0",
    "[[reward]]\nfunction = 'terrace.rl.sort_task:reward'\nmodel = 'm'",
    "[[reward]]\nmodel = 'nowhere'",
    "pool = 3",
    "[[pool]]\nranks = 3\nroles = ['actor']",
    "[[pool]]\nranks = 8\nroles = []",
    "[[pool]]\nranks = 8\nroles = ['actor', 'nobody']",
    "[[pool]]\nranks = 1e21\nroles = ['actor']",
    "[[pool]]\nranks = 1000000000000000000000\nroles = ['actor']",
    "[[pool]]\nranks = 4\nroles = ['actor']\n[[pool]]\nranks = 4\nroles = ['rollout', 'actor']",
    "plans = 3",
    "[plans]\nactor = 3",
    "[plans.reference]\npreset = 'zero3'\nparams_backward = 'device'",
    "plan = 3",
    "model = 3",
    "weights = 3",
    "[algorithm]\nname = []",
    "[train]\nsteps = 1",
    "nothing = {}",
    "a = " + "[" * 500,
)
_REWARDS = {
    "leaves": "import sys\nsys.exit(3)\n",
    "breaks": "def f(:\n",
    "raises": "raise KeyError('a')\n",
    "is_async": "async def f(samples):\n    return []\n",
    "of_two": "def f(one, two):\n    return []\n",
    "wants": "def f(completions, answer, **columns):\n    return []\n",
    "no_function": "f = 3\n",
}
_PROMPTS = (
    "",
    "{",
    "[1]\n",
    '{"text": "a"}\n',
    '{"prompt": 3}\n',
    '{"prompt": ""}\n',
    "\x00",
    '{"prompt": "' + "a" * 500 + '"}\n',
)


class CameToItsWorkError(Exception):
    """A start passed all checks."""


def cases(folder: Path) -> Iterator[Case]:
    """All inputs; `folder` has the files that they name."""
    explain = ("rl", "--task", "sort", "--explain")
    for key in _KEYS:
        for value in _VALUES:
            yield Case("values of keys", (*explain, f"--{key}={value}"))
        section, _, name = key.rpartition(".")
        if section:
            yield Case("misspelt keys", (*explain, f"--{section}.{name}x", "1"))
    for words in _WITHOUT_EFFECT:
        at = explain[:3] if words.startswith("--place") else explain
        yield Case("without effect", (*at, *words.split(" ")))
    for words in _STARTS:
        named = () if "--task" in words or "--resume" in words else ("--task", "sort")
        yield Case("starts", ("rl", *named, *words.split(" ")))
    for number, text in enumerate(_FILES):
        (folder / f"bad{number}.toml").write_text(text)
        yield Case("files", (*explain, "--config", f"bad{number}.toml"))
        yield Case("files", ("rl", "--config", f"bad{number}.toml"))
    yield from _own(folder)


def _own(folder: Path) -> Iterator[Case]:
    """Runs on a model, prompts and rewards of one's own, each with one fault."""

    def own(name: str, **more: Any) -> tuple[str, ...]:
        write_own(folder, **more).rename(folder / f"{name}.toml")
        return "rl", "--config", f"{name}.toml"

    for name, text in _REWARDS.items():
        (folder / f"{name}_rewards.py").write_text(text)
        yield Case("rewards", own(f"of_{name}", reward=[{"function": f"{name}_rewards:f"}]))
    for number, reward in enumerate(("nowhere:f", "good_rewards", "good_rewards:g", ":f", "good_rewards:", "../a:f")):
        yield Case("rewards", own(f"reward{number}", reward=[{"function": reward}]))
    for number, text in enumerate(_PROMPTS):
        (folder / f"bad{number}.jsonl").write_text(text)
        yield Case("prompts", own(f"prompts{number}", run={"prompts_file": f"bad{number}.jsonl"}))
    for number, name in enumerate(("nowhere.jsonl", ".", "/dev/null", "model/model.safetensors")):
        yield Case("prompts", own(f"files{number}", run={"prompts_file": name}))
    usual = own("good")
    for words in (
        *("--optimizer.lr 0.003", "--run.start_steps 1", "--run.held_out 3", "--run.prompt_column text"),
        *("--algorithm.name ppo --run.critic_lr 0.01", "--run.max_prompt 1", "--plan.wire.gather.node int8"),
        *("--model model/config.json", "--run.high_lr true", "--run.rows 3", "--run.reward_timeout_s 0"),
        *("--run.responses 1 --run.mini_batch 2", "--plan.micro_batch 0", "--run.mini_batch 7"),
    ):
        yield Case("own runs", (*usual, *words.split(" ")))
    yield Case("own runs", own("lost", weights="nowhere"))


@contextmanager
def without_processes() -> Iterator[None]:
    """A start that passes all checks ends there."""

    def came(*_: Any, **__: Any) -> None:
        raise CameToItsWorkError

    with mock.patch.object(rl_run, "started", came), mock.patch.object(rl_run, "_runtime", came):
        yield


def run(number: int | None, seed: int = 0) -> list[Ended]:
    """Run `number` of the inputs, as many of each kind as there may be, or all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with campaign(folder), without_processes():
            every = list(cases(folder))
            return [ended(case) for case in (every if number is None else _sample(every, number, seed))]


def _sample(every: Sequence[Case], number: int, seed: int) -> list[Case]:
    kinds = list(dict.fromkeys(case.kind for case in every))
    drawn, found = random.Random(seed), list[Case]()
    for kind in kinds:
        own = [case for case in every if case.kind == kind]
        found += drawn.sample(own, min(len(own), number // len(kinds)))
    return found


def accepted(found: Sequence[Ended]) -> list[Ended]:
    """Inputs that were taken although each of their kind is wrong."""
    return [each for each in found if each.how in ("accepted", *BAD) and each.case.kind != "values of keys"]


if __name__ == "__main__":
    results = run(int(sys.argv[1]) if len(sys.argv) > 1 else None)
    print(table(results))
    for each in results:
        if each.how in BAD or each in accepted(results):
            print(f"{each.how}: {' '.join(repr(word)[:80] for word in each.case.words)} -> {each.said!r}")
    for each in results:
        if each.how == "accepted" and each not in accepted(results):
            print("accepted:", " ".join(repr(word)[:60] for word in each.case.words[4:]))
    print("slowest:", sorted(((round(each.took_s, 1), each.case.words[-1][:60]) for each in results), reverse=True)[:8])
