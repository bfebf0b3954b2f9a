"""Run the lab: every contestant in processes of its own, one after the other, in rounds of alternating order.

On each kind of links a contestant's settings are tried first, in a short run; the fastest that fits the memory limit is
measured. Links are `lab`, those of the cluster preset, and `frontier`, in the proportion of a 20 B model on Frontier.
An estimate is printed first, and nothing starts that would not end within --minutes by the estimate.

Each finished case is appended to the results file as one line of JSON, so a crash loses nothing else and a second call
resumes where the first stopped. The rehearsal cluster needs root, for network namespaces; with --plain the ranks share
the loopback instead, no link is slow, and none counts bytes.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.claims import judge, options_for_claims
from bench.lab.contest import model_of
from bench.lab.entries import ACCUMS, CONTESTANTS, TRIED_ACCUM
from bench.lab.job import TRIAL_STEPS, Job
from bench.lab.launch import is_root
from bench.lab.launches import command, machine, run
from bench.lab.links import FRONTIER, LAB, LOOPBACK, on_frontier, preset_rates, rate_words, rates_in_proportion
from bench.lab.results import goals, read, summarise
from bench.lab.schedule import DROPPED_AT, Task, estimate_s, micro_batch_s, missing, taken, tasks
from terrace.model.blocks import num_params

TIMEOUT_S = 900.0  # of one launch
GRACE_S = 120.0  # for a launch that takes longer than its estimate, beyond --minutes
_ASSUMED_SEQUENCE_S = 0.4  # until compute has been measured


class Lab:
    """One run: its options, the results file, and the rates of its links."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._job, self._machine = options, Job(), machine()
        self._end_s = time.monotonic() + 60 * options.minutes
        self.left_out = 0

    def records(self) -> list[dict[str, Any]]:
        """The measurements at this scale."""
        return [record for record in read(self._options.results) if record["scale"] == self._options.scale]

    def rates(self, links: str) -> Mapping[str, float]:
        """Bytes/s of one rank by tier, without the scale; those of Frontier stay as they were first derived."""
        if links != FRONTIER:
            return preset_rates()
        records = self.records()
        for record in records:
            if record["links"] == FRONTIER:
                return dict(record["rates"])
        seconds = micro_batch_s(records) or _ASSUMED_SEQUENCE_S
        return rates_in_proportion(on_frontier(), seconds, num_params(model_of(self._job)), self._job)

    def estimate_s(self, task: Task) -> float:
        """Seconds of a task on two idle cores."""
        if task.entry.absence():
            return 0.0
        return estimate_s(task, self.rates(task.links), self._options.scale, self._options.steps, self._job)

    def remaining(self) -> list[Task]:
        """The launches whose results are missing."""
        options, records = self._options, self.records()
        whole = tasks(options.names, options.links, options.rounds)
        return [task for task in whole if missing(task, records, options.accum, options.retry)]

    def run(self, task: Task) -> None:
        """Run a task, unless the time is over or nothing of it is missing by now."""
        options, entry, records = self._options, task.entry, self.records()
        wanted = missing(task, records, options.accum, options.retry)
        if not wanted:
            return
        left_s = self._end_s - time.monotonic()
        waits = task.kind == "cases" and self._untried(task, records)
        if self.estimate_s(task) > left_s or waits:
            self.left_out += 1
            return
        words = "trials" if task.kind == "trials" else f"round {task.round + 1}/{options.rounds}"
        print(f"{task.links} links, {words}, {entry.name}: ", end="", flush=True)
        if error := entry.absence():
            self._fail(task, wanted, error)
        elif task.links == FRONTIER and micro_batch_s(records) is None:
            self._fail(task, wanted, "compute alone was not measured, so the links' rates are not known")
        elif task.kind == "trials":
            self._try(task, wanted)
        elif (trial := taken(records, task.links, entry)) is None:
            self._fail(
                task,
                wanted,
                next((str(record["error"]) for record in records if _is_failed_trial(record, task)), "no setting ran"),
            )
        else:
            cases = [(accum, trial.name) for accum in wanted]
            found, error = self._launch(task, cases, options.steps, 0.0)
            if lost := set(wanted) - {record["accum"] for record in found}:
                self._fail(task, sorted(lost), error or "no result")

    def _try(self, task: Task, names: Sequence[str]) -> None:
        left = list(names)
        while left and time.monotonic() < self._end_s:  # a trial that fails ends the processes: the next start anew
            cases = [(TRIED_ACCUM, name) for name in left]
            found, error = self._launch(task, cases, TRIAL_STEPS, DROPPED_AT)
            done = {record["trial"] for record in found}
            left = [name for name in left if name not in done]
            if left:
                self._fail(task, left[:1], error or "no result")
                left = left[1:]
        self.left_out += bool(left)

    def _launch(
        self, task: Task, cases: Sequence[tuple[int, str]], steps: int, drop: float
    ) -> tuple[list[dict[str, Any]], str]:
        begin_s, load = time.monotonic(), os.getloadavg()[0]
        timeout_s = min(TIMEOUT_S, self._end_s - begin_s + GRACE_S)
        rates = {tier: rate * self._options.scale for tier, rate in self.rates(task.links).items()}
        found, error = run(command(task.entry, cases, steps, drop, task.links, rates), timeout_s)
        for record in found:
            self._append(task, {**record, "load": load})
        steps_s = [f"{record['trial']} accum {record['accum']}: {min(record['steps_s']):.2f} s" for record in found]
        print(" | ".join(steps_s) + f" {error}  ({time.monotonic() - begin_s:.0f} s)", flush=True)
        return found, error

    def _fail(self, task: Task, wanted: Sequence[Any], error: str) -> None:
        key = "trial" if task.kind == "trials" else "accum"
        for each in wanted:
            self._append(task, {"contestant": task.entry.name, "accum": TRIED_ACCUM, key: each, "error": error})
        print(f"no result for {', '.join(map(str, wanted))}: {error}", flush=True)

    def _untried(self, task: Task, records: Sequence[Mapping[str, Any]]) -> bool:
        trials = Task("trials", task.links, task.entry)
        return len(task.entry.trials) > 1 and bool(missing(trials, records, ()))

    def _append(self, task: Task, record: Mapping[str, Any]) -> None:
        place = {"kind": task.kind, "links": task.links, "scale": self._options.scale, "round": task.round}
        path = self._options.results
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({**self._machine, **place, "rates": self.rates(task.links), **record}) + "\n")


def _is_failed_trial(record: Mapping[str, Any], task: Task) -> bool:
    own = (record["kind"], record["links"], record["contestant"]) == ("trials", task.links, task.entry.name)
    return own and "error" in record


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    names = [entry.name for entry in CONTESTANTS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"names separated by commas, of: {', '.join(names)}")
    parser.add_argument("--links", nargs="+", choices=(LAB, FRONTIER), default=[LAB, FRONTIER])
    parser.add_argument(
        "--accum", type=int, nargs="+", choices=ACCUMS, default=list(ACCUMS), help="sequences of a step"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of the central contestants; the others have one")
    parser.add_argument("--steps", type=int, default=2, help="timed steps of a round, after one to warm up")
    parser.add_argument("--minutes", type=float, default=33.0, help="what would end later is left for a second call")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of all links' rates")
    parser.add_argument("--quick", action="store_true", help="one round of one step on links ten times as fast")
    parser.add_argument("--plain", action="store_true", help="torchrun on the loopback: no root, no links, no bytes")
    parser.add_argument("--estimate", action="store_true", help="print the estimate and stop")
    parser.add_argument("--results", type=Path, default=Path("runs/lab.jsonl"))
    parser.add_argument("--fresh", action="store_true", help="put the results file aside first")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    options_for_claims(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.scale = 1, 1, 10.0
    if options.plain:
        options.links = [LOOPBACK]
    options.names = options.only.split(",") if options.only else names
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; contestants are {', '.join(names)}")
    return options


def main() -> int:
    """Run the cases missing in the results file."""
    options = parse()
    if not options.plain and not options.estimate and not is_root():
        print("the rehearsal cluster needs root, for network namespaces; --plain runs on the loopback instead")
        return 1
    if options.fresh and options.results.exists():
        options.results.rename(options.results.with_suffix(".old.jsonl"))
    lab = Lab(options)
    remaining = lab.remaining()
    total_s = sum(map(lab.estimate_s, remaining))
    print(
        f"{len(remaining)} launches, about {total_s / 60:.0f} minutes on two idle cores; --minutes {options.minutes:g} "
        f"bounds them; load average now {os.getloadavg()[0]:.1f}"
    )
    if options.estimate:
        return 0
    for task in remaining:
        lab.run(task)
    if lab.left_out:
        print(f"{lab.left_out} launches are left for a second call: they would have ended after --minutes")
    for links in set(options.links) - {LOOPBACK}:
        print(f"{links} links: {rate_words(lab.rates(links), options.scale)}")
    print(f"results in {options.results}; python -m bench.lab.report {options.results} makes the page")
    found = [
        claim
        for links, cases in summarise(lab.records()).items()
        for claim in goals(cases, Job(), links, int(machine()["cores"])).values()
        if claim is not None
    ]
    return judge(found, options)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that links are taken down then, too
    sys.exit(main())
