"""Islands of which one is killed every 20 s: what survivors lose and how many tokens count, beside torchft's DiLoCo.

    python -m bench.elastic [--seconds 480] [--every 18] [--seeds 0 1 2]        as root, with the extra lab
    python -m bench.elastic --in-exchange                          an island is killed in its next exchange
    python -m bench.elastic --runs none                            the table again, from the results

Three islands, each in a network namespace with a link of 8 Mbit/s, so that an exchange takes some 0.8 s, and a
window of 18 steps 9 s. Both
contestants train the same decoder with the same optimizers at the same pace, notice a dead process after the same time
and restart it after the same time; kills come at the same seconds. A token counts if an exchange took the change of an
island that trained on it. Under torchft every island has a third of the batch and no more; in a roster those that are
there have all of it. Every run is a line of the results; a run that they have is not repeated.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from bench.claims import Claim, judge, measured, options_for_claims, print_table, versioned
from bench.elastic.job import Job, Model, anchor_file
from bench.elastic.member import LOG, OWN, TORCHFT, faults
from bench.lab.launch import child_environment
from bench.lab.links import PRESET, overrides
from terrace.roster.entries import Attempted, Committed, Gone
from terrace.roster.place import read_log

ROOT = Path(__file__).parents[2]
_RATE = 1e6  # bytes/s of an island's link
RUNS = {"own": (OWN, True), "torchft": (TORCHFT, True), "undisturbed": (OWN, False)}


def run(name: str, seed: int, setting: dict[str, Any]) -> dict[str, Any]:
    """One run, and its figures."""
    contestant, is_faulty = RUNS[name]
    with tempfile.TemporaryDirectory() as folder:
        job = Job(contestant=contestant, folder=folder, seed=seed, **setting)
        job = job if is_faulty else replace(job, fault_s=0.0)
        sizes = {"package": 1, "node": 1, "system": job.islands}
        words = [sys.executable, "-m", "terrace", "rehearse", "run", "--cluster", PRESET, *overrides({"system": _RATE})]
        words += [f"--cluster.tiers.{tier}.size={size}" for tier, size in sizes.items()]
        words += ["--", sys.executable, "-m", "bench.elastic.member", json.dumps(asdict(job))]
        subprocess.run(words, cwd=ROOT, env=child_environment(), check=True, stdout=subprocess.DEVNULL)
        found = of_roster(job) if contestant == OWN else of_torchft(job)
        return {
            "run": name,
            "seed": seed,
            **setting,
            "faults": len(faults(job)),
            "load": os.getloadavg()[0],
            **found,
        }


def _events(job: Job) -> list[dict[str, Any]]:
    """What all islands did, in order of time."""
    lines = [
        {"rank": rank, **json.loads(line)}
        for rank in range(job.islands)
        for line in (Path(job.folder) / f"events-{rank}.jsonl").read_text().splitlines()
    ]
    return sorted(lines, key=lambda line: float(line["time"]))


def of_roster(job: Job) -> dict[str, Any]:
    """The figures of a run under a roster, from its log."""
    tokens, counted, attempt, lost = 0, dict[int, int](), None, 0
    for entry in read_log(Path(job.folder) / LOG):
        if isinstance(entry, Attempted):
            attempt = entry
        elif isinstance(entry, Committed):
            assert attempt is not None
            tokens += sum(each.tokens for each in attempt.islands.values())
            counted[attempt.result] = tokens
        elif isinstance(entry, Gone) and entry.first >= 0:
            lost += entry.share * (entry.last - entry.first + 1) * job.tokens_a_round
    dropped = sum(event["kind"] == "dropped" for event in _events(job))
    return {"tokens": tokens, "lost_by_killed": lost, "lost_by_survivors": dropped, "curve": _curve(job, counted)}


def of_torchft(job: Job) -> dict[str, Any]:
    """The figures of a run under torchft: windows that were not committed, and those of a newcomer, do not count."""
    tokens, counted, lost, healed = 0, dict[int, int](), 0, 0
    for event in _events(job):
        if event["kind"] != "window":
            continue
        own = event["rounds"] * job.tokens_a_round
        lost += not event["committed"]
        healed += event["committed"] and event["healed"]
        if event["committed"] and not event["healed"]:
            tokens += own
            counted[event["version"]] = tokens
    return {"tokens": tokens, "lost_by_survivors": lost, "lost_by_newcomers": healed, "curve": _curve(job, counted)}


def _curve(job: Job, counted: dict[int, int]) -> list[tuple[int, float]]:
    """(tokens that count, held-out loss) after every exchange."""
    paths = {anchor_file(Path(job.folder), version): tokens for version, tokens in sorted(counted.items())}
    there = {path: tokens for path, tokens in paths.items() if path.exists()}  # a writer may have been killed
    model, found = Model(job) if there else None, []
    for path, tokens in there.items():
        with suppress(EOFError, RuntimeError):  # half written
            assert model is not None
            found.append((tokens, model.held_out(torch.load(path))))
    return found


def loss_gap(curve: Sequence[tuple[int, float]], undisturbed: Sequence[tuple[int, float]]) -> float:
    """Mean relative gap of the last tenth of a curve to the undisturbed one at equal tokens, interpolated."""
    gaps = []
    for tokens, loss in curve[-max(1, len(curve) // 10) :]:
        after = next((place for place, each in enumerate(undisturbed) if each[0] >= tokens), len(undisturbed) - 1)
        (first, low), (last, high) = undisturbed[max(0, after - 1)], undisturbed[after]
        there = high if last == first else low + (high - low) * min(1.0, (tokens - first) / (last - first))
        gaps.append(loss / there - 1)
    return statistics.fmean(gaps)


def table(results: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[Claim]:
    """Print the results, and judge them."""
    by = {(each["run"], each["seed"]): each for each in results}
    header = ("seed", "run", "kills", "tokens that count", "windows lost by survivors", "by newcomers", "loss", "gap")
    rows, gains, gaps = [], [], []
    for seed in seeds:
        for name in RUNS:
            each = by[name, seed]
            gap = loss_gap(each["curve"], by["undisturbed", seed]["curve"])
            gaps += [gap] if name == "own" else []
            cells = (each["faults"], f"{each['tokens']:,}", each["lost_by_survivors"], each.get("lost_by_newcomers", 0))
            rows.append([str(cell) for cell in (seed, name, *cells, f"{each['curve'][-1][1]:.4f}", f"{gap:+.2%}")])
        gains.append(by["own", seed]["tokens"] / by["torchft", seed]["tokens"])
    print_table(header, rows)
    lost = [float(by["own", seed]["lost_by_survivors"]) for seed in seeds]
    return [
        measured("windows that survivors of kills lose", lost, 0.0),
        measured(
            "tokens that count, one island killed every 20 s",
            gains,
            1.3,
            at_least=True,
            rival=versioned("torchft", "DiLoCo"),
        ),
        measured("loss at equal tokens, above an undisturbed run's by", gaps, 0.01),
    ]


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--every", type=int, default=18, help="steps of a window, 0.5 s each")
    parser.add_argument("--in-exchange", action="store_true", help="kill an island when it next exchanges")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", nargs="+", choices=[*RUNS, "none"], default=list(RUNS))
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "elastic.jsonl")
    options_for_claims(parser)
    options = parser.parse_args(words)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    setting = {"seconds": options.seconds, "every": options.every, "in_exchange": options.in_exchange}
    found = [each for each in map(json.loads, lines) if each.items() >= setting.items()]
    for seed in options.seeds:
        for name in RUNS:
            if name in options.runs and not any((each["run"], each["seed"]) == (name, seed) for each in found):
                found.append(run(name, seed, setting))
                print(json.dumps({key: value for key, value in found[-1].items() if key != "curve"}), flush=True)
                with options.results.open("a") as file:
                    file.write(json.dumps(found[-1]) + "\n")
    missing = [
        (name, seed)
        for seed in options.seeds
        for name in RUNS
        if not any((each["run"], each["seed"]) == (name, seed) for each in found)
    ]
    if missing:
        print(f"no table yet: {missing} are missing")
        return 0
    return judge(table(found, options.seeds), options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
