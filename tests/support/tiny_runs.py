"""A run of `terrace train` that takes seconds: a tiny model, a tiny text, a cluster of any tier sizes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomli_w

from terrace.base.schema import dump
from tests.support import warm
from tests.support.toys import cluster_of

MODEL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def write_run(folder: Path, *sizes: int, plan: str = "three-level", **train: Any) -> Path:
    """Write text, cluster, model and run files into `folder`; return the file for `--config`."""
    lines = (f"The fox of line {number} jumps over the lazy dog.\n" for number in range(200))
    (folder / "text.txt").write_text("".join(lines))
    (folder / "cluster.toml").write_text(tomli_w.dumps(dump(cluster_of(*sizes))))
    (folder / "config.json").write_text(json.dumps(MODEL))
    table = {
        "cluster": "cluster.toml",
        "model": "config.json",
        "plan": {"preset": plan, "compute": "fp32", "micro_batch": 1, "unit": 1},
        "data": {"path": "text.txt", "cache": "cache"},
        "train": {"steps": 6, "batch": 8, "sequence": 16, "warmup_steps": 2, "timeout_s": 30.0} | train,
        "optimizer": {"lr": 1e-2},
    }
    (folder / "run.toml").write_text(tomli_w.dumps(table))
    return folder / "run.toml"


def terrace(
    *words: str | Path, cwd: Path, timeout_s: float = 330.0, umask: int | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run `terrace` with these arguments in `cwd` to its end, in a process of its own that starts warm."""
    return warm.run([*map(str, words)], cwd, environment(), timeout_s, umask)


@contextmanager
def started(*words: str | Path, cwd: Path, cold: bool = False) -> Iterator["warm.Command | subprocess.Popen[str]"]:
    """Start `terrace` with these arguments, warm or as a shell does; at the end nothing of it is left."""
    process: warm.Command | subprocess.Popen[str]
    if cold:
        command = [sys.executable, "-m", "terrace", *map(str, words)]
        process = subprocess.Popen(
            command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    else:
        process = warm.Command([*map(str, words)], cwd, environment())
    family: set[int] = set()
    try:
        family = {process.pid}
        yield process
    finally:
        family |= descendants(process.pid)
        process.kill()
        process.wait()
        for pid in family:
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def environment() -> dict[str, str]:
    """The environment of a run: one thread a process, and this source tree."""
    root = str(Path(__file__).parents[2])
    return {**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1"}


def descendants(root: int) -> set[int]:
    """Return every process below `root`: the fork server, its children, the resource tracker."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(path.parent.name)] = int(path.read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
    found = {root}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {root}


def is_alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def all_gone(pids: set[int], within_s: float = 30.0) -> bool:
    """Wait for processes to end."""
    deadline_s = time.monotonic() + within_s
    while any(map(is_alive, pids)):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.05)
    return True


def wait_for_step(run_folder: Path, step: int, within_s: float = 240.0) -> None:
    """Wait until the metrics file has this step."""
    path, deadline_s = run_folder / "metrics.jsonl", time.monotonic() + within_s
    while not path.exists() or path.read_text().count("\n") < step:
        assert time.monotonic() < deadline_s, f"no step {step} in {path}"
        time.sleep(0.02)


def wait_for_checkpoint(run_folder: Path, step: int, within_s: float = 240.0) -> None:
    """Wait until a checkpoint, which is written in the background, is whole."""
    manifest, deadline_s = (
        run_folder / "checkpoints" / f"step-{step:08d}" / "manifest.json",
        time.monotonic() + within_s,
    )
    while not manifest.exists():
        assert time.monotonic() < deadline_s, f"no {manifest}"
        time.sleep(0.02)


def rank_pids(parent: int) -> list[int]:
    """Return the processes of the ranks of a local run, in no order: the children of the fork server."""
    children = descendants(parent)
    direct = {pid for pid in children if _parent(pid) == parent}
    return sorted(children - direct)


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    """Return the loss of every step."""
    return [line["loss"] for line in metrics(run_folder)]


def one_line(text: str) -> str:
    """Return the only line of stderr, an error of ours."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert re.match(r"terrace: error: \S", lines[0]), text
    return lines[0]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
