"""The tests that need a device, by pytest."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_parts.setting import Row, Setting

ROOT = Path(__file__).parents[2]


def rows(setting: Setting) -> Iterator[Row]:
    """One row: pytest's last line."""
    which = ["--collect-only"] if setting.tiny else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *which],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    yield Row("pytest -m gpu", lines[-1], done.returncode == 0)
