"""Counts the Python calls of a piece of code: a measure of work without a clock, equal on a loaded machine."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
_OURS = os.path.join(ROOT, "terrace") + os.sep
ROOM = 1.1  # of a pinned count: small changes pass


class Calls:
    """The number of calls so far of functions (and bodies of modules and classes) in `terrace/`."""

    def __init__(self) -> None:
        self.num = 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(_OURS):
            self.num += 1


@contextmanager
def counted() -> Iterator[Calls]:
    """Counts the calls of this thread in the body."""
    calls = Calls()
    sys.setprofile(calls)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def calls_in_a_child(code: str, cwd: Path | None = None) -> int:
    """Calls of `code` in a fresh process, its imports included."""
    program = (
        "import sys\nfrom tests.support.calls import counted\nwith counted() as calls:\n"
        + "".join(f"    {line}\n" for line in code.splitlines())
        + "print(calls.num, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=cwd or ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return int(done.stderr.splitlines()[-1])


def check_calls(found: int, pinned: int) -> None:
    """Asserts that `found` calls are at most a tenth more than pinned, and not so few that the pin has become idle."""
    assert found <= ROOM * pinned, f"{found} calls, and {pinned} are pinned: find what is called more, or say why"
    assert found >= 0.5 * pinned, f"{found} calls are less than half of {pinned}: pin the new number"
