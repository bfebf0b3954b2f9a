"""One contestant in processes of its own, on emulated links or on the loopback; no process outlives it."""

import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.lab.entries import Entry
from bench.lab.job import Job
from bench.lab.launch import MARK, child_environment
from bench.lab.links import LOOPBACK, PRESET, overrides

ROOT = Path(__file__).parents[2]

Wanted = Sequence[tuple[int, str]]  # accumulations and names of trials


def command(entry: Entry, wanted: Wanted, steps: int, drop: float, links: str, rates: Mapping[str, float]) -> list[str]:
    """The command line that runs a contestant with links of these rates."""
    rank = ["-m", "bench.lab.rank", entry.name, "--steps", str(steps), "--drop", f"{drop:g}"]
    rank += ["--cases", json.dumps(list(wanted))]
    if links == LOOPBACK:
        return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(Job().world_size), *rank]
    rehearse = ["-m", "terrace", "rehearse", "run", "--cluster", PRESET, *overrides(rates)]
    return [sys.executable, *rehearse, "--", sys.executable, *rank]


def run(line: Sequence[str], timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """(records of one contestant, error in one line or "")."""
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
        error = f"did not end within {timeout_s:.0f} s"
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
    for package in ("torch", "deepspeed", "torchft"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found
