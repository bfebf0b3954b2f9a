"""States on a disk by the kernel's own counters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("states", "saved_bytes"), [("optimizer", 8), ("optimizer,params,grads", 14)])
def test_memory_and_bytes_are_the_formulas(tmp_path: Path, states: str, saved_bytes: int) -> None:
    """Anonymous memory falls by what the formula says to 5 %, and the kernel moves its bytes."""
    words = ["-m", "bench.offload", "--steps", "5", "--folder", str(tmp_path), "--states", states]
    found: dict[str, Any] = {}
    for medium in ("device", "disk"):
        done = subprocess.run(
            [sys.executable, *words, "--measure", medium], cwd=ROOT, capture_output=True, text=True, check=True
        )
        found[medium] = json.loads(done.stdout.splitlines()[-1])
    device, disk = found["device"], found["disk"]
    assert device["losses"] == disk["losses"]
    saved, formula = (device[key] - disk[key] for key in ("anonymous_bytes", "state_bytes"))
    assert formula > 0.9 * saved_bytes * disk["numel"] - 4 * 12.6e6  # of 60 M parameters, less the ring
    assert abs(saved / formula - 1) < 0.05
    assert disk["read_bytes"] == disk["predicted_bytes"] == disk["measured_bytes"]
    assert 0 <= disk["written_bytes"] - disk["predicted_written_bytes"] < 1e5, (
        "beside what the file system writes of its own"
    )
    assert not list(tmp_path.iterdir())
