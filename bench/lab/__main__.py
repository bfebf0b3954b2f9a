"""Run the lab: every contestant in processes of its own, one after the other, in rounds of alternating order.

Each finished case is appended to the results file as one line of JSON, so a crash loses nothing else and a second call
resumes where the first stopped. The rehearsal cluster needs root, for network namespaces; with --plain the ranks share
the loopback instead, no link is slow, and none counts bytes.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.lab.job import CONTESTANTS, Entry, Job
from bench.lab.launch import MARK, child_environment, is_root
from terrace.plan.presets import PRESETS

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 900.0  # of one contestant; ZeRO-3 on the slow links takes about three minutes


def command(options: argparse.Namespace, entry: Entry, accums: Sequence[int]) -> list[str]:
    """The command line that runs one contestant."""
    cases = ["--accum", *map(str, accums), "--steps", str(options.steps)]
    rank = ["-m", "bench.lab.rank", entry.name, *cases]
    if options.plain:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(Job().world_size), *rank]
    rehearse = ["-m", "terrace", "rehearse", "run", "--cluster", "lab", "--scale", f"{options.scale:g}"]
    return [sys.executable, *rehearse, "--", sys.executable, *rank]


def run(line: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """(records of one contestant, error in one line or ""); no process outlives this."""
    child = subprocess.Popen(
        line,
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = child.communicate(timeout=timeout_s)
        error = "" if child.returncode == 0 else cause(output, child.returncode)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as stop:
        os.killpg(child.pid, signal.SIGTERM)  # the launcher ends its ranks and takes its links down
        try:
            output, _ = child.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output, _ = child.communicate()
        if isinstance(stop, KeyboardInterrupt):
            raise
        error = f"did not end within {timeout_s:g} s"
    found = [json.loads(text.split(MARK, 1)[1]) for text in output.splitlines() if MARK in text]
    return found, error


def cause(output: str, code: int) -> str:
    """The first exception that a rank printed, from which the others follow."""
    raised = re.findall(r"^(?:.*?[\]|:] *)?((?:\w+\.)*\w*(?:Error|Exception): .*)$", output, re.MULTILINE)
    own = [text for text in raised if "ChildFailedError" not in text and "Connection closed by peer" not in text]
    lines = own or raised or [text for text in output.splitlines() if text.strip()][-1:] or ["no output"]
    return f"exit {code}: {lines[0].strip()[:300]}"


def machine() -> dict[str, str]:
    """Description of this machine, without names of hosts or paths."""
    names = re.findall(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    found = {
        "processor": names[0] if names else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "kernel": platform.release().split("-")[0],
        "python": platform.python_version(),
    }
    for package in ("torch", "deepspeed"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def read_results(path: Path) -> list[dict[str, Any]]:
    """The records in the file; a last line cut off by a crash does not count."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            print(f"{path}: one line is not whole and is left out", file=sys.stderr)
    return found


def append(path: Path, record: dict[str, Any]) -> None:
    """Add one line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")


def contest(options: argparse.Namespace, entry: Entry, accums: Sequence[int], common: dict[str, Any]) -> None:
    """Run one contestant and record the outcome."""
    preset = entry.options.get("preset")
    begin, load = time.perf_counter(), os.getloadavg()[0]
    records: list[dict[str, Any]] = []
    if entry.is_ours and preset not in PRESETS:
        error = f"this version of Terrace has no preset {preset!r} yet"
    else:
        records, error = run(command(options, entry, accums), TIMEOUT_S)
    for record in records:
        append(options.results, {**common, "load": load, **record})
    for accum in set(accums) - {record["accum"] for record in records}:
        append(options.results, {**common, "contestant": entry.name, "accum": accum, "error": error or "no result"})
    steps = " | ".join(f"accum {record['accum']}: {min(record['steps_s']):.2f} s best" for record in records)
    print(f"{steps}{error}  ({time.perf_counter() - begin:.0f} s)", flush=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options."""
    names = [entry.name for entry in CONTESTANTS]
    parser = argparse.ArgumentParser(
        prog="python -m bench.lab", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help=f"names separated by commas, of: {', '.join(names)}")
    parser.add_argument("--accum", type=int, nargs="+", default=[1, 4], help="micro-batches of a step")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of a round, after one to warm up")
    parser.add_argument("--scale", type=float, default=1.0, help="how much faster than 800 and 100 Mbit/s links are")
    parser.add_argument("--quick", action="store_true", help="one round of one step on links ten times as fast")
    parser.add_argument("--plain", action="store_true", help="torchrun on the loopback: no root, no links, no bytes")
    parser.add_argument("--results", type=Path, default=Path("runs/lab.jsonl"))
    parser.add_argument("--fresh", action="store_true", help="put the results file aside first")
    parser.add_argument("--retry", action="store_true", help="run again what failed")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.steps, options.scale = 1, 1, 10.0
    options.names = options.only.split(",") if options.only else names
    if unknown := set(options.names) - set(names):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; contestants are {', '.join(names)}")
    return options


def main() -> int:
    """Run the cases missing in the results file."""
    options = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that links are taken down then, too
    if not options.plain and not is_root():
        print("the rehearsal cluster needs root, for network namespaces; --plain runs on the loopback instead")
        return 1
    if options.fresh and options.results.exists():
        options.results.rename(options.results.with_suffix(".old.jsonl"))
    links = "none" if options.plain else f"{options.scale:g}"
    common = {"links": links, "timed": options.steps, **machine()}
    for number in range(options.rounds):
        entries = [entry for entry in CONTESTANTS if entry.name in options.names]
        for entry in entries if number % 2 == 0 else reversed(entries):
            done = {
                record["accum"]
                for record in read_results(options.results)
                if record["contestant"] == entry.name
                and record["links"] == links
                # A failed case would fail again unless something has changed.
                and (not options.retry if "error" in record else record["round"] == number)
            }
            accums = [accum for accum in options.accum if accum not in done]
            if accums:
                print(f"round {number + 1}/{options.rounds} {entry.name}: ", end="", flush=True)
                contest(options, entry, accums, {**common, "round": number})
    print(f"results in {options.results}; python -m bench.lab.report {options.results} makes the page")
    return 0


if __name__ == "__main__":
    sys.exit(main())
