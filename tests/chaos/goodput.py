"""A run that is killed again and again at random: its goodput, measured and predicted: `python -m tests.chaos.goodput`.

Ranks get SIGKILL at instants of a clock that never stops, so restarts are struck, too; the same command goes on at once
each time. Mean time between kills, restart, stall and interval are those of the run itself, so that what is compared is
the closed form of `terrace.planner.goodput`, and the machine's load does not count. Links are paced: a step takes its
time without the processor.
"""

import argparse
import json
import math
import os
import random
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import tomli_w

from terrace.planner.goodput import Job, Save
from terrace.train.recorder import EVENTS
from terrace.train.saves import FIRST
from tests.chaos.strikes import ranks_of
from tests.support import warm
from tests.support.tiny_runs import environment, metrics, write_run

STEPS, MEAN_S = 300, 30.0
WORDS = ("train", "--config", "run.toml", "--folder", "run", "--resume", "auto")
_RATE = 12e6  # bytes/s of the links: a step of some tenths of a second
_MODEL = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 257}
_LIMIT_S = 1500.0
_TYPICAL = 5  # kills that have the mean and the spread of all


@dataclass(frozen=True, kw_only=True)
class Killed:
    """What a run made of its time. Seconds; the goodput is over the wall time from its first step to its last."""

    num_kills: int
    goodput: float
    predicted: float
    mean_s: float  # between kills
    restart_s: float  # with the first save of a start
    stall_s: float
    work_s: float  # between saves
    wall_s: float

    def __str__(self) -> str:
        error = 100 * (self.predicted / self.goodput - 1)
        return (
            f"{self.num_kills} kills in {self.wall_s:.0f} s, one every {self.mean_s:.1f} s; restart "
            f"{self.restart_s:.2f} s, a save stalls {self.stall_s:.3f} s after {self.work_s:.2f} s of work: goodput "
            f"{self.goodput:.3f}, predicted {self.predicted:.3f} ({error:+.1f} %)"
        )


def write_killed(folder: Path, steps: int, mean_s: float) -> None:
    """The files of the run: two ranks, saves that are waited for, every kill known to the cluster's file."""
    path = write_run(folder, 2, plan="zero1", steps=steps, checkpoint_every="auto", background_save=False, batch=2)
    cluster = tomllib.loads((folder / "cluster.toml").read_text())
    cluster["tiers"][0]["bandwidth_bytes_per_s"] = _RATE
    cluster["failures"] = {"device_hours": 2 * mean_s / 3600, "restart_s": mean_s / 5}
    (folder / "cluster.toml").write_text(tomli_w.dumps(cluster))
    model = folder / "config.json"
    model.write_text(json.dumps(json.loads(model.read_text()) | _MODEL))
    assert path.name == WORDS[2]


def kills(mean_s: float, number: int, seed: int) -> list[float]:
    """Seconds between kills: quantiles of the exponential distribution in random order, so that few are typical."""
    found = [-mean_s * math.log(1 - (each + 0.5) / number) for each in range(number)]
    random.Random(seed).shuffle(found)
    return found


def play(folder: Path, steps: int = STEPS, mean_s: float = MEAN_S, seed: int = 1) -> Killed:
    """Runs to the end through all kills."""
    write_killed(folder, steps, mean_s)
    words = {**environment(), "TERRACE_PACE": "1"}
    gaps, struck = kills(mean_s, _TYPICAL, seed), list[float]()  # in seconds since 1970, as the metrics have
    lines: list[dict[str, Any]] = []  # of every step that was made, taken back or not
    deadline_s, next_s, code = time.monotonic() + _LIMIT_S, math.inf, 1
    while code != 0:
        command = warm.Command(WORDS, folder, words)
        with ThreadPoolExecutor(1) as reader:
            said = reader.submit(command.communicate, _LIMIT_S)
            while not said.done():
                assert time.monotonic() < deadline_s, f"no end after {len(struck)} kills"
                if next_s == math.inf and _num_lines(folder):  # the clock starts with the first step
                    next_s = time.time() + gaps[0]
                if time.time() >= next_s:
                    _kill(command.pid, len(struck))
                    struck.append(next_s)
                    next_s += gaps[len(struck) % len(gaps)]
                time.sleep(0.01)
        code = command.wait()
        assert code in (0, 1, -signal.SIGKILL), said.result()
        assert code == 0 or struck, said.result()
        seen_s = lines[-1]["time"] if lines else 0.0
        lines += [line for line in metrics(folder / "run") if line["time"] > seen_s]
    (folder / "killed.json").write_text(json.dumps([struck, lines]))
    return judged(folder, struck, lines)


def _num_lines(folder: Path) -> int:
    path = folder / "run" / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _kill(launcher: int, number: int) -> None:
    ranks = ranks_of(launcher)
    os.kill(ranks[number % len(ranks)] if ranks else launcher, signal.SIGKILL)


def judged(folder: Path, struck: Sequence[float], lines: Sequence[dict[str, Any]]) -> Killed:
    """What a run made of its time: its folder, the instants of kills, and the metrics of all steps ever made."""
    kept = metrics(folder / "run")
    first_s, last_s = _begin_s(lines[0]), kept[-1]["time"]
    wall_s, struck = last_s - first_s, [each for each in struck if each < last_s]
    restarts = list[float]()
    for at_s, later_s in zip(struck, [*struck[1:], math.inf], strict=True):
        begin_s = min((_begin_s(line) for line in lines if _begin_s(line) > at_s), default=math.inf)
        if begin_s < later_s:
            restarts.append(begin_s - at_s)
    events = [json.loads(line) for line in (folder / "run" / EVENTS).read_text().splitlines()]
    saves = [each["step"] for each in events if each["event"] == "saved" and each["step"]]
    # From the end of a step to that of the next, with what lies between; after a save its stall is a part.
    plain, after_saves = list[float](), list[float]()
    for line, after in pairwise(lines):
        if after["step"] == line["step"] + 1 and not any(line["time"] < each < after["time"] for each in struck):
            (after_saves if line["step"] in saves else plain).append(after["time"] - line["time"])
    step_s = fmean(plain)
    # The interval that the run agreed on: the first save of a start comes sooner, and is a part of the restart.
    work_s = median(b - a for a, b in pairwise(saves) if b > a + FIRST) * step_s
    save = Save(stall_s=fmean(after_saves) - step_s)
    job = Job(mean_s=wall_s / len(struck), restart_s=fmean(restarts) + save.stall_s)
    return Killed(
        num_kills=len(struck),
        goodput=len(kept) * step_s / wall_s,
        predicted=job.goodput(work_s, save),
        mean_s=job.mean_s,
        restart_s=job.restart_s,
        stall_s=save.stall_s,
        work_s=work_s,
        wall_s=wall_s,
    )


def _begin_s(line: dict[str, Any]) -> float:
    return float(line["time"] - line["step_s"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--mean", type=float, default=MEAN_S, metavar="SECONDS", help="between kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep the run in this empty folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terrace-goodput-") as name:
        folder = Path(name) if options.folder is None else options.folder
        found = play(folder, options.steps, options.mean, options.seed)
    print(found, flush=True)
    return int(abs(found.predicted / found.goodput - 1) > 0.05)


if __name__ == "__main__":
    sys.exit(main())
