"""Names of a rehearsal's namespaces, and detection of those that a dead rehearsal left behind.

A name carries the process id and start time of its rehearsal, because process ids are reused:
`terrace-<pid>-<start>-fabric`, `terrace-<pid>-<start>-r<rank>`.
"""

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/run/netns")  # where `ip netns` keeps the names
_NAME = re.compile(r"terrace-(\d+)-(\d+)-(fabric|r\d+)")
_START_FIELD = 22  # of /proc/PID/stat, counted from 1: ticks since boot at which the process started


@dataclass(frozen=True, order=True)
class Owner:
    pid: int
    start: int

    @property
    def fabric(self) -> str:
        return f"terrace-{self.pid}-{self.start}-fabric"

    def rank(self, rank: int) -> str:
        return f"terrace-{self.pid}-{self.start}-r{rank}"


def owner_of(name: str) -> Owner | None:
    found = _NAME.fullmatch(name)
    return Owner(int(found[1]), int(found[2])) if found else None


def this_process() -> Owner:
    pid = os.getpid()
    return Owner(pid, start_of(pid) or 0)


def start_of(pid: int) -> int | None:
    """Start time of a process in the kernel's ticks; None if no process has this id."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    after_name = text.rpartition(")")[2].split()  # the name in parentheses may hold spaces
    return int(after_name[_START_FIELD - 3])


def existing() -> list[str]:
    return sorted(os.listdir(FOLDER)) if FOLDER.is_dir() else []


def leftovers(names: Iterable[str], start: Callable[[int], int | None] = start_of) -> dict[Owner, list[str]]:
    """Namespaces of rehearsals that are no longer alive, by rehearsal; foreign names are ignored."""
    found: dict[Owner, list[str]] = {}
    for name in names:
        owner = owner_of(name)
        if owner is not None and start(owner.pid) != owner.start:
            found.setdefault(owner, []).append(name)
    return found


def of_owner(names: Iterable[str], owner: Owner) -> list[str]:
    return [name for name in names if owner_of(name) == owner]
