"""Disks that are full or cannot be written, at every place that a run writes: `python -m tests.chaos.disks`.

Needs the right to mount. A case passes if the run ends with one line that names the folder and the reason, leaves every
checkpoint whole, and goes on with the numbers of the undisturbed run once the disk is well again.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.plans import CASES, STEPS, write_case
from tests.chaos.play import LIMIT_S, WORDS, differences, reference, unsound
from tests.chaos.scene import Scene, private_mounts
from tests.chaos.strikes import Markers
from tests.support import warm
from tests.support.tiny_runs import environment

CASE = next(case for case in CASES if case.name == "zero2 on 4")
_REASONS = ("No space left on device", "Read-only file system", " free, but ")


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[None]:
    """A file system in memory on a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all that is left of the disk of `folder`."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while file.write(b"\0" * size):
                    pass
            except OSError:
                continue
    return path


def run(folder: Path, fill_at: int | None = None, disk: Path | None = None) -> tuple[int, str]:
    """Exit code and errors of a run, whose disk is filled once it has made `fill_at` steps."""
    command = warm.Command(WORDS, folder, environment())
    markers = Markers(folder, command.pid, CASE.num_ranks, STEPS)
    with ThreadPoolExecutor(1) as reader:
        said = reader.submit(command.communicate, LIMIT_S)
        if fill_at is not None and disk is not None and markers.has_made(fill_at):
            fill(disk)
        _, errors = said.result()
    return command.wait(), errors.strip()


def judged(name: str, code: int, errors: str) -> list[str]:
    """What is wrong with the end of a run on a bad disk."""
    if code == 0:
        return [f"{name}: ended well"]
    lines = errors.splitlines()
    # A line before it may say that an event of the run (a busy machine, say) was not written.
    if len(lines) == 2 and lines[0].startswith("terrace: cannot write run/events.jsonl: "):
        del lines[0]
    if code not in (1, 2) or len(lines) != 1 or not any(reason in lines[0] for reason in _REASONS):
        return [f"{name}: ended with {code}: {errors}"]
    print(f"{name}: {errors}", flush=True)
    return []


def trials(scene: Scene, whole: Path) -> list[str]:
    """Everything that is wrong, a line each."""
    wrong: list[str] = []
    for place in ("run", "cache"):
        for options, what in (("size=8k", "full"), ("ro", "read-only")):
            folder = _fresh(scene)
            name = f"{place} {what} from the start"
            with mounted(folder / place, options):
                wrong += judged(name, *run(folder))
            wrong += _whole_again(name, folder, whole)
    for step in (1, 3, 5):
        folder, name = _fresh(scene), f"run full after step {step}"
        disk = folder / "run"
        with mounted(disk, "size=4m"):
            wrong += judged(name, *run(folder, step, disk))
            wrong += [f"{name}: {each}" for each in unsound(folder)]
            (disk / "filler").unlink()
            wrong += _whole_again(name, folder, whole)
    folder, name = _fresh(scene), "run read-only at a resume"
    shutil.copytree(whole / "run", folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / f"step-{STEPS:08d}")
    with read_only(folder / "run"):
        wrong += judged(name, *run(folder))
    return wrong + _whole_again(name, folder, whole)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that cannot be written."""
    subprocess.run(["mount", "--bind", str(folder), str(folder)], check=True)
    subprocess.run(["mount", "-o", "remount,ro,bind", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def _fresh(scene: Scene) -> Path:
    folder = scene.folder / "disk"
    shutil.rmtree(folder, ignore_errors=True)
    write_case(folder, CASE)
    return folder


def _whole_again(name: str, folder: Path, whole: Path) -> list[str]:
    code, errors = run(folder)
    if code != 0 or errors:
        return [f"{name}: the resume ended with {code}: {errors}"]
    return [f"{name}: {each}" for each in differences(whole / "run", folder / "run")]


def main() -> int:
    if not private_mounts():
        print("mounting is not permitted here: run as root")
        return 2
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="terrace-disks-") as folder:
        scene, whole = Scene(Path(folder, "scene")), Path(folder, "whole")
        reference(whole, CASE)
        wrong = trials(scene, whole)
    print("\n".join(f"FAILED {each}" for each in wrong) or "every disk was survived")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
