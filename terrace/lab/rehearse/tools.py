"""Calls of `ip` and `tc`, and the checks that a machine can run them."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from terrace.base.errors import ClusterError
from terrace.lab.rehearse.wiring import Wiring

_NET_ADMIN, _SYS_ADMIN = 12, 21  # bits of CapEff in /proc/self/status: change networks; make namespaces
_RANK_BYTES = 300 * 10**6  # a Python process with torch and a small model
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"  # a user's own PATH often lacks the sbin folders
_TIMEOUT_S = 60.0

_PACED = "or add --paced, which needs no root and holds `terrace` itself to the cluster's rates"


def call(words: Sequence[str], batch: str = "") -> str:
    """Run one tool with `batch` as its input and return its output. Raises `ClusterError` with the kernel's reason."""
    tool = find(words[0])
    try:
        # In a separate session, so that Ctrl-C does not reach the tool directly.
        done = subprocess.run(
            [tool, *words[1:]],
            input=batch,
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            start_new_session=True,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(words)} did not end within {_TIMEOUT_S:g} s") from error
    if done.returncode:
        raise ClusterError(f"the kernel refused `{_culprit(words, batch, done.stderr)}`: {_first_line(done.stderr)}")
    return done.stdout


def check_machine(wiring: Wiring) -> None:
    """Raise `ClusterError` when this machine lacks the rights, tools or memory to emulate `wiring`."""
    check_rights(capabilities())
    for tool in ("ip", "tc"):
        find(tool)
    check_memory(wiring.cluster.world_size, available_bytes())


def check_rights(capabilities: int) -> None:
    """Raise `ClusterError` unless the process may change networks and make namespaces."""
    if not (capabilities >> _NET_ADMIN & 1 and capabilities >> _SYS_ADMIN & 1):
        raise ClusterError(f"emulating a network needs root (CAP_NET_ADMIN and CAP_SYS_ADMIN): use sudo, {_PACED}")


def check_memory(num_ranks: int, free_bytes: int) -> None:
    """Raise `ClusterError` when the ranks would not fit."""
    if num_ranks * _RANK_BYTES > free_bytes:
        raise ClusterError(
            f"{num_ranks} ranks take about {num_ranks * _RANK_BYTES / 1e9:.1f} GB, and this machine has "
            f"{free_bytes / 1e9:.1f} GB available: "
            + (f"emulate at most {most} ranks here" if (most := free_bytes // _RANK_BYTES) else "free some of it")
        )


def available_bytes() -> int:
    """Memory available to programs. Raises `ClusterError` where Linux does not say."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ClusterError("/proc/meminfo names no MemAvailable: a Linux of 2014 or newer is needed")


def capabilities() -> int:
    """Effective capability bits of this process. Raises `ClusterError` outside Linux."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise ClusterError(f"emulating a network needs Linux: use one, {_PACED}") from error
    found = [line.split()[1] for line in status.splitlines() if line.startswith("CapEff:")]
    return int(found[0], 16) if found else (-1 if os.geteuid() == 0 else 0)


def find(tool: str) -> str:
    """Path of `ip` or `tc`, independent of PATH. Raises `ClusterError` when not installed."""
    path = shutil.which(tool, path=_PATH)
    if path is None:
        raise ClusterError(f"no program {tool!r} in {_PATH}: install the package iproute2, {_PACED}")
    return path


def _culprit(words: Sequence[str], batch: str, said: str) -> str:
    # After a refusal the tools print `Command failed -:LINE`.
    number = said.rstrip().rpartition(":")[2]
    lines = batch.splitlines()
    if "Command failed" in said and number.isdecimal() and 0 < int(number) <= len(lines):
        return f"{words[0]} {lines[int(number) - 1]}"
    return " ".join(words)


def _first_line(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0].removeprefix("Error: ") if lines else "it gave no reason"
