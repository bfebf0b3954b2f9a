"""A long run of tiny steps whose processes must not grow: `python -m tests.chaos.soak --minutes 30`.

Four ranks, two pipeline stages of two ZeRO-3 ranks with int4 gradients, a checkpoint in the background every 20 steps.
Resident memory, threads, descriptors and mapped shared memory of every process are sampled. Printed are the mean and
the slope over steps of a least-squares line with its standard error, without the first half of the samples, in which
caches warm up and the bounded histories of a run fill (the newest 100 checkpoints, the last 1,000 losses).
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.plans import SOAK, write_case
from tests.support.tiny_runs import descendants, rank_pids, started, wait_for_step

_WARM = 0.5  # of the samples

Samples = Mapping[tuple[str, str], Sequence[tuple[float, float]]]  # (process, quantity) -> (steps made, value)


def slope(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """(mean, slope, standard error of the slope) of values; at least three points."""
    num = len(points)
    mean_x, mean_y = (sum(point[axis] for point in points) / num for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    residual = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in points)
    return mean_y, rise, (residual / (num - 2) / spread) ** 0.5


def sampled(pid: int) -> dict[str, float]:
    """Resident memory, threads, descriptors and open or mapped files in shared memory of a process."""
    proc = Path("/proc", str(pid))
    status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
    maps = {line.split(maxsplit=5)[-1] for line in (proc / "maps").read_text().splitlines() if "/dev/shm/" in line}
    return {
        "resident kB": float(status["VmRSS"].split()[0]),
        "threads": float(status["Threads"]),
        "descriptors": float(len(os.listdir(proc / "fd"))),
        "shared files": float(len(maps)),
    }


def soak(folder: Path, minutes: float, every_s: float) -> Samples:
    """Samples of every process of a run."""
    write_case(folder, SOAK, steps=10_000_000, checkpoint_every=20, timeout_s=120.0, log_every=1000)
    found = defaultdict[tuple[str, str], list[tuple[float, float]]](list)
    with started("train", "--config", "run.toml", "--folder", "run", cwd=folder) as process:
        wait_for_step(folder / "run", 20)
        names = {process.pid: "launcher"} | {pid: f"rank {at}" for at, pid in enumerate(rank_pids(process.pid))}
        names |= dict.fromkeys(descendants(process.pid) - names.keys(), "helper")
        begin_s = time.monotonic()
        while time.monotonic() - begin_s < 60 * minutes:
            num_steps = (folder / "run" / "metrics.jsonl").read_bytes().count(b"\n")
            for pid, name in names.items():
                for quantity, value in sampled(pid).items():
                    found[name, quantity].append((num_steps, value))
            time.sleep(every_s)
    return found


def table(samples: Samples) -> str:
    """A line for every process and quantity; `grows` where the slope is above four standard errors, and over a run that
    is as long as the samples it adds up to more than one in a hundred.
    """
    num_steps = max(points[-1][0] for points in samples.values())
    lines = [
        f"{num_steps:g} steps",
        f"{'process':10}{'quantity':16}{'mean':>12}{'per 1000 steps':>18}{'its error':>14}",
    ]
    for (name, quantity), points in sorted(samples.items()):
        mean, rise, error = slope(points[int(len(points) * _WARM) :])
        grows = "  grows" if rise > 4 * error and rise * num_steps > 0.01 * mean else ""
        lines.append(f"{name:10}{quantity:16}{mean:12.1f}{1000 * rise:18.4f}{1000 * error:14.4f}{grows}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=5.0, help="seconds between samples")
    parser.add_argument("--samples", type=Path, metavar="FILE", help="write all samples, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="terrace-soak-") as folder:
        samples = soak(Path(folder), options.minutes, options.every)
    text = table(samples)
    if options.samples is not None:
        options.samples.write_text(json.dumps({" ".join(key): points for key, points in samples.items()}))
    print(text, flush=True)
    return int("  grows" in text)


if __name__ == "__main__":
    sys.exit(main())
