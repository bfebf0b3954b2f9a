"""The machine of a campaign: mounts, temporary files and processes that are its own."""

import ctypes
import os
import signal
import subprocess
import time
from pathlib import Path

from terrace.launch.fork_server import start_fork_server
from tests.support import warm
from tests.support.tiny_runs import descendants, environment, is_alive

LEAVE_S = 20.0
_START_S = 150.0
_CLONE_NEWNS = 0x20000  # linux/sched.h
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_SHARED = Path("/dev/shm")


def private_mounts() -> bool:
    """Give this process and its children mounts of their own, and shared memory; False where that is not permitted."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS) != 0:
        return False
    commands = ["mount --make-rprivate /", f"mount -t tmpfs tmpfs {_SHARED}"]
    return all(subprocess.run(command.split(), capture_output=True).returncode == 0 for command in commands)


class Scene:
    """The machine of a campaign: a folder, a folder for temporary files, and the processes that are its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._temporary = folder, folder / "tmp"
        self._temporary.mkdir(parents=True)
        # Before any process starts: the fork servers keep the folder that they find.
        os.environ["TMPDIR"] = str(self._temporary)
        # Processes whose parent was killed become children of this one, and so are found.
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        start_fork_server("tests.chaos.quick")
        warm.run(["--version"], folder, environment(), _START_S)
        self._own, self._shared, self._files = descendants(os.getpid()), self._in_shared(), self._in_temporary()

    def orphans(self, within_s: float = LEAVE_S) -> set[int]:
        """Processes that are left over after some seconds; they are ended."""
        deadline_s = time.monotonic() + within_s
        while left := {pid for pid in descendants(os.getpid()) - self._own if is_alive(pid)}:
            if time.monotonic() > deadline_s:
                break
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        for pid in descendants(os.getpid()) - self._own:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                continue
        return left

    def leftovers(self, *, resumes: bool) -> list[str]:
        """Files in shared memory and temporary folders that were not there before. Each is named once.

        A process that was killed with all its ranks leaves its folder of sockets to the next start: with `resumes`,
        that is allowed.
        """
        shared, files = self._in_shared() - self._shared, self._in_temporary() - self._files
        if resumes:
            files = {name for name in files if not name.startswith("terrace-ranks-")}
        self._shared |= shared
        self._files |= files
        return sorted(f"/dev/shm/{name}" for name in shared) + sorted(files)

    def _in_shared(self) -> set[str]:
        return {path.name for path in _SHARED.iterdir() if path.stat().st_uid == os.getuid()}

    def _in_temporary(self) -> set[str]:
        return {path.name for path in self._temporary.iterdir()}
