"""States on a disk by the kernel's own counters."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.memory_group import memory_group
from bench.offload_limit import in_group, limit_of, options_of
from terrace.base.errors import ConfigError

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


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_states_of_four_times_the_memory_train_in_a_group(tmp_path: Path) -> None:
    words = ["--steps", "2", "--folder", str(tmp_path)]
    limit = limit_of(options_of(words))
    try:
        with memory_group(limit):
            pass
    except ConfigError as error:
        pytest.skip(str(error))
    refused, trained = (in_group(words, medium, limit) for medium in ("device", "disk"))
    assert "the model state needs 2.77 GB a rank" in refused.stderr
    assert not trained.returncode, trained.stderr
    found = json.loads(trained.stdout.splitlines()[-1])
    assert found["numel"] * 20 == pytest.approx(4 * limit)
    for row in found["rows"]:
        assert row["anonymous_bytes"] == pytest.approx(found["formula_bytes"], rel=0.05)
        (read, written), (reads, writes) = row["moved"], found["predicted_bytes"]
        assert read == reads
        assert 0 <= written - writes < 1e5, "beside what the file system writes of its own"
    assert not list(tmp_path.iterdir())
