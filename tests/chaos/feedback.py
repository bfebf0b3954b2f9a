"""Kills and signals at random instants of `terrace rl`: `python -m tests.chaos.feedback`.

Each run is resumed with the same command until it is whole, and compared with the undisturbed run of its kind: numbers
of every step, samples, and every tensor of all roles' last checkpoints. Seeded as the campaign of `terrace train`; a
failure is one line with the command that repeats it. `--only TEXT` keeps the cases whose kind or strike has the text.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli_w
import torch

from terrace.base.schema import merge
from terrace.checkpoint.layout import complete, latest
from terrace.checkpoint.reading import Checkpoint
from terrace.rl.placing import LEARNING
from tests.chaos.scene import Scene
from tests.support import warm
from tests.support.hf_folder import TABLE, write_model
from tests.support.rl_runs import OF_TIME
from tests.support.tiny_runs import descendants, environment, is_alive, rank_pids

STEPS, RESUMES, LIMIT_S = 5, 3, 150.0
WORDS = ("rl", "--config", "run.toml", "--folder", "run", "--resume", "auto")
_SAVING = 0.3  # of the strikes: as soon as a save is seen
MODEL = TABLE | {"num_hidden_layers": 1}
_MODELS = {"model": MODEL, "judge": MODEL | {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}}
_PROMPTS = ("The fox", "lazy dog", "quick", "brown 0123", "jumps")
_REWARDS = """
def near(samples):
    return [-abs(len(each.response) - each.data["wanted"]) / 10 for each in samples]


def long(samples):
    return [len(each.response) / 20 for each in samples]
"""
_BASE: dict[str, Any] = {
    "model": "model",
    "cluster": "local",
    "plan": {"preset": "ddp", "micro_batch": 2},
    "run": {"prompts_file": "prompts.jsonl", "max_prompt": 12, "max_response": 6, "steps": STEPS, "held_out": 1}
    | {"high_lr": True}
    | {"prompts": 2, "responses": 4, "mini_batch": 4, "evaluate_every": 2, "warmup_steps": 1, "timeout_s": 60.0},
    "reward": [{"function": "my_rewards:near"}],
    "optimizer": {"lr": 1e-2},
    "algorithm": {"name": "grpo", "kl_coefficient": 0.05},
}
_PPO = {"algorithm": {"name": "ppo"}, "reward": [{"function": "my_rewards:near"}, {"model": "judge", "weight": 2.0}]}
_SAFE = {"algorithm": {"name": "safe-rlhf", "cost_threshold": 0.3}, "cost": {"function": "my_rewards:long"}}
_APART = {"pool": [{"ranks": 1, "roles": ["actor"]}, {"ranks": 1, "roles": ["rollout"]}]}


def _run(**keys: int) -> dict[str, Any]:
    return {"run": keys}


@dataclass(frozen=True)
class Kind:
    """A kind of run, by the layers of its file over `_BASE`."""

    name: str
    num_ranks: int
    layers: tuple[dict[str, Any], ...]

    @property
    def words(self) -> list[str]:
        """The command that begins the run, or goes on with it, in a folder that `write` made."""
        sizes = {"package": self.num_ranks, "node": 1, "system": 1}
        return [*WORDS, *(f"--cluster.tiers.{tier}.size={size}" for tier, size in sizes.items())]

    def write(self, folder: Path) -> None:
        """The run's file and all that it reads, in a new folder."""
        folder.mkdir(parents=True)
        for name, model in _MODELS.items():
            (folder / name).mkdir()
            write_model(folder / name, model)
        lines = [{"prompt": text, "wanted": len(text)} for text in _PROMPTS]
        (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (folder / "my_rewards.py").write_text(_REWARDS)
        table = _BASE
        for layer in self.layers:
            table = merge(table, layer)
        (folder / "run.toml").write_text(tomli_w.dumps(table))


KINDS = (
    Kind("grpo, one process", 1, (_run(checkpoint_every=1),)),
    Kind("safe-rlhf, one process", 1, (_SAFE,)),
    Kind("grpo, two ranks", 2, ()),
    Kind("ppo with a reward model, two ranks", 2, (_PPO, _run(checkpoint_every=2))),
    Kind("grpo, two pools", 2, (_APART, _run(checkpoint_every=1))),
    Kind("grpo, two pools, a step ahead", 2, (_APART, _run(max_lag=1, checkpoint_every=2))),
    Kind("ppo, two pools, two steps ahead", 2, (_APART, _PPO, _run(max_lag=2, checkpoint_every=1))),
)


@dataclass(frozen=True)
class Strike:
    """A signal at `where` in [0, 1) of a run, or to the first save after that."""

    victim: str
    signal: str
    where: float
    is_saving: bool
    rank: int = 0

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.victim == "rank" else self.victim
        return f"{self.signal} to {who} at {self.where:.3f}{', in a save' if self.is_saving else ''}"


_SIGNALS = {
    "controller": ("SIGKILL", "SIGINT", "SIGTERM", "SIGUSR1"),
    "rank": ("SIGKILL",),
    "all": ("SIGKILL", "SIGTERM", "SIGINT"),
}


def case_of(seed: int, number: int) -> tuple[Kind, Strike]:
    """The kind and the strike of a case; kinds take turns."""
    generator = random.Random(f"feedback {seed} {number}")
    kind = KINDS[number % len(KINDS)]
    victim = generator.choice(("controller", "controller", "all", *("rank",) * 2 * (kind.num_ranks > 1)))
    return kind, Strike(
        victim=victim,
        signal=generator.choice(_SIGNALS[victim]),
        where=generator.random(),
        is_saving=generator.random() < _SAVING,
        rank=generator.randrange(kind.num_ranks),
    )


@dataclass
class Result:
    """How a struck run ended, and everything that is wrong."""

    end: str = "missed"
    wrong: list[str] = field(default_factory=list)


def undisturbed(folder: Path, kind: Kind) -> float:
    """Makes the run of a kind in `folder`; returns the seconds that it took."""
    kind.write(folder)
    begin_s = time.monotonic()
    ended = warm.run(kind.words, folder, environment(), LIMIT_S)
    if ended.returncode:
        raise RuntimeError(f"the undisturbed run of {kind.name} failed: {ended.stderr}")
    return time.monotonic() - begin_s


def play(scene: Scene, kind: Kind, what: Strike, whole: Path, took_s: float) -> Result:
    """Strike a run, resume it until it is whole, and compare it with that in `whole`."""
    result, folder = Result(), scene.folder / "case"
    shutil.rmtree(folder, ignore_errors=True)
    kind.write(folder)
    code, errors, is_struck = _attempt(kind, folder, what, took_s)
    if is_struck:
        _judge(what, code, errors, (folder / "run").exists(), result)
    result.wrong += [f"{len(left)} processes were left over" for left in [scene.orphans()] if left]
    _unsound(folder, result)
    for _ in range(RESUMES):
        code, errors, _ = _attempt(kind, folder, None, took_s)
        if not code and not errors.strip():
            break
        result.wrong.append(f"a resume ended with {code}: {errors.strip()[-400:]}")
    result.wrong += differences(whole / "run", folder / "run")
    hidden = [path for path in (folder / "run").rglob(".*") if path.name != ".lock"]
    result.wrong += [f"left over: {path.relative_to(folder)}" for path in hidden]
    return result


def differences(whole: Path, run: Path) -> list[str]:
    """What two run folders of one kind differ in."""
    found = []
    for name in ("metrics.jsonl", "samples.jsonl"):
        ours, theirs = (_lines(each / name) for each in (run, whole))
        if ours != theirs:
            at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours))
            found.append(f"{name} differs from line {at + 1} on ({len(ours)} of {len(theirs)} lines)")
    for role in LEARNING:
        mine, other = (latest(each / role) for each in (run, whole))
        if mine is None or other is None or mine.name != other.name:
            found += [f"the last checkpoint of {role} is {mine}, not {other}"] * (mine is not other)
            continue
        values, there = Checkpoint(mine), Checkpoint(other)
        found += [
            f"{role}: {block}.{name}/{kind} differs"
            for block in there.layout
            for name, kinds in there.read(block).items()
            for kind, value in kinds.items()
            if not torch.equal(values.read(block)[name][kind], value)
        ][:1]
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return [{name: value for name, value in line.items() if not name.startswith((*OF_TIME, "crc32"))} for line in lines]


def _attempt(kind: Kind, folder: Path, what: Strike | None, took_s: float) -> tuple[int, str, bool]:
    """Exit code and errors of the command, and whether it was struck."""
    command, is_struck = warm.Command(kind.words, folder, environment()), False
    with ThreadPoolExecutor(1) as reader:
        said = reader.submit(command.communicate, LIMIT_S)
        if what is not None:
            time.sleep(what.where * took_s * (0.7 if what.is_saving else 1.0))
            if what.is_saving:
                _until(lambda: _saves(folder / "run") or not is_alive(command.pid))
            if what.victim == "rank":
                _until(lambda: len(rank_pids(command.pid)) > what.rank or not is_alive(command.pid))
            is_struck = _strike(what, command.pid)
        try:
            _, errors = said.result()
        except subprocess.TimeoutExpired:
            errors = f"did not end within {LIMIT_S:g} s"
    return -1000 if command.returncode is None else command.returncode, errors, is_struck


def _until(come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not come() and time.monotonic() < deadline_s:
        time.sleep(0.001)


def _saves(run: Path) -> bool:
    folders = [run / role / "checkpoints" for role in LEARNING]
    return any(path.name.startswith(".") for each in folders if each.is_dir() for path in each.iterdir())


def _strike(what: Strike, controller: int) -> bool:
    ranks = rank_pids(controller)
    pids = {
        "controller": [controller],
        "rank": ranks[what.rank : what.rank + 1],
        "all": [controller, *descendants(controller)],
    }[what.victim]
    is_struck = False
    for pid in pids:
        try:
            os.kill(pid, signal.Signals[what.signal])
            is_struck = True
        except ProcessLookupError:
            continue
    return is_struck


def _judge(what: Strike, code: int, errors: str, has_begun: bool, result: Result) -> None:
    lines = errors.strip().splitlines()
    if code == 0:
        result.end = "went on"
    elif what.victim != "rank" and what.signal == "SIGKILL" and code == -signal.SIGKILL:
        result.end = "killed"
    elif what.victim != "rank" and code in (128 + signal.SIGINT, 128 + signal.SIGTERM):
        result.end = "stopped in order"
        wanted = signal.SIGINT if what.signal == "SIGINT" else signal.SIGTERM
        # Without a folder there is no command that goes on with it.
        is_said = "terrace rl" in errors or "saved checkpoints are complete" in errors or not has_begun
        if code != 128 + wanted or not is_said:
            result.wrong.append(f"ended with {code}: {errors.strip()[-400:]}")
    elif what.victim != "rank" and code == -signal.Signals[what.signal]:
        result.end = "before its handlers"  # as any program that has just been started
    elif what.victim == "rank" and code == 1 and f"was killed by {what.signal}" in errors:
        result.end = "named"
    else:
        result.end = "other"
        result.wrong.append(f"ended with {code}: {errors.strip()[-400:]}")
    if len(lines) > 1 or "Traceback" in errors:
        result.wrong.append(f"{len(lines)} lines on stderr: {errors.strip()[-600:]}")


def _unsound(folder: Path, result: Result) -> None:
    for role in LEARNING:
        for path in complete(folder / "run" / role / "checkpoints"):
            Checkpoint(path).verify()


def campaign(seed: int, numbers: Sequence[int], only: str, folder: Path) -> list[tuple[Kind, Strike, Result]]:
    """Play the cases one after the other; undisturbed runs are made once a kind."""
    scene, took_s, played = Scene(folder / "scene"), dict[str, float](), list[tuple[Kind, Strike, Result]]()
    for number in numbers:
        kind, what = case_of(seed, number)
        if only not in f"{kind.name} {what}":
            continue
        whole = folder / "undisturbed" / kind.name
        if kind.name not in took_s:
            took_s[kind.name] = undisturbed(whole, kind)
        result = play(scene, kind, what, whole, took_s[kind.name])
        played.append((kind, what, result))
        print(f"case {number}, {kind.name}: {what}: {result.end}", flush=True)
        for wrong in result.wrong:
            again = f"python -m tests.chaos.feedback --seed {seed} --first {number} --cases 1"
            print(f"FAILED case {number}, {kind.name}: {what}: {wrong}; repeat: {again}", flush=True)
    return played


def main(words: Sequence[str] | None = None) -> int:
    """Play a campaign; returns 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", metavar="TEXT")
    options = parser.parse_args(words)
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="terrace-chaos-") as folder:
        numbers = range(options.first, options.first + options.cases)
        played = campaign(options.seed, numbers, options.only, Path(folder))
    ends = Counter(result.end for _, _, result in played)
    wrong = sum(bool(result.wrong) for _, _, result in played)
    said = ", ".join(f"{num} {end}" for end, num in ends.most_common())
    print(f"{len(played)} cases: {said}; {wrong} wrong", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
