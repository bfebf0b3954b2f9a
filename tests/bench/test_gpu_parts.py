"""`bench/gpu.py` on a machine without a GPU: parts run at their smallest, and none that fails costs another."""

import subprocess
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest

from bench.gpu import PARTS, Part, run_parts
from bench.gpu_parts.setting import Setting

HERE = ("exactness", "codecs", "bandwidth", "products", "attention", "generation", "training:engine", "training:plain")


@pytest.mark.parametrize("name", HERE)
def test_a_part_runs_on_the_cpu(name: str, tmp_path: Path) -> None:
    setting = Setting(device="cpu", tiny=True, peak_tflops=1.0, folder=tmp_path)
    module, _, argument = name.partition(":")
    rows = import_module(f"bench.gpu_parts.{module}").rows
    found = list(rows(setting, argument) if argument else rows(setting))
    assert found
    assert all(row.passes for row in found), found


def test_every_part_has_a_module_and_they_are_worth_more_than_their_time() -> None:
    for part in PARTS:
        assert hasattr(import_module(f"bench.gpu_parts.{part.name.partition(':')[0]}"), "rows")
    assert sum(part.limit_s for part in PARTS[:6]) <= 540, "the first parts always have their time"


def test_a_part_that_fails_hangs_or_is_late_costs_no_other(tmp_path: Path) -> None:
    codes = {
        "good": "print('[\"a\", \"1\", true]', file=open(file, 'a'))",
        "dies": "print('[\"b\", \"2\", false]', file=open(file, 'a', 1)); import os; os.abort()",
        "hangs": "import time; time.sleep(60)",
        "last": "print('[\"c\", \"3\"]', file=open(file, 'a'))",
    }

    def command(part: str, file: Path) -> Sequence[str]:
        return [sys.executable, "-c", f"file = {str(file)!r}; {codes[part]}"]

    parts = [Part(name, 2.0 if name == "hangs" else 20.0) for name in codes]
    found = list(run_parts(parts, command, tmp_path, time.monotonic() + 60))
    assert [(part, row.subject, row.passes) for part, row in found] == [
        ("good", "a", True),
        ("dies", "b", False),
        ("dies", "failed", False),
        ("hangs", "failed", False),
        ("last", "c", True),
    ]
    assert found[2][1].found.startswith("ended with -6")
    assert found[3][1].found.startswith("had not ended after 2 s")
    late = list(run_parts(parts, command, tmp_path, time.monotonic() + 1))
    assert [row.found for _, row in late] == ["no time was left"] * len(parts)


def test_without_a_device_it_says_so() -> None:
    words = [sys.executable, "-m", "bench.gpu", "--only", "nothing"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, check=False, env={"CUDA_VISIBLE_DEVICES": ""}
    )
    assert (done.returncode, done.stdout) == (
        0,
        "no CUDA device here: nothing was run (--device cpu --tiny tries the parts)\n",
    )
    words += ["--device", "cpu"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no part begins so" in done.stderr
