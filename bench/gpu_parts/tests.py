"""The tests that need a device, by pytest.

Only files that have such tests are read: others may need packages that a machine with a device lacks.
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_parts.setting import Row, Setting

ROOT = Path(__file__).parents[2]


_MARK = re.compile(r"^\s*@?pytest\.mark\.gpu\b|\bmarks?=.*pytest\.mark\.gpu\b|^pytestmark\b.*\bmark\.gpu\b", re.M)


def files(folder: Path = ROOT / "tests") -> list[Path]:
    """Test files with the mark `gpu`."""
    return [path for path in sorted(folder.rglob("test_*.py")) if _MARK.search(path.read_text(encoding="utf-8"))]


def rows(setting: Setting) -> Iterator[Row]:
    """One row: pytest's last line."""
    which = ["--collect-only"] if setting.tiny else []
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *which, *map(str, files())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    print(done.stdout, done.stderr)
    lines = done.stdout.strip().splitlines() or ["nothing was printed"]
    # Tests that all skip, or none, have shown nothing.
    is_shown = "passed" in lines[-1] or not setting.is_cuda or setting.tiny
    yield Row("pytest -m gpu", lines[-1], done.returncode == 0 and is_shown)
