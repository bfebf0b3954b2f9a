"""A memory control group for one process of a benchmark, below the group that this process is in.

Under cgroup v1 a group is a folder of the memory hierarchy, under v2 one of the only hierarchy, where the parent must
hand on the memory controller (Linux, Documentation/admin-guide/cgroup-v1/memory.rst and cgroup-v2.rst). Since it lies
below the parent's, the parent's own limits hold as well.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from terrace.base.errors import ConfigError

_LIMITS = {"cgroup": "memory.limit_in_bytes", "cgroup2": "memory.max"}


@dataclass(frozen=True)
class MemoryGroup:
    """A group, by its `folder` in the hierarchy."""

    folder: Path

    def enter(self) -> None:
        """Move this process into the group."""
        (self.folder / "cgroup.procs").write_text(str(os.getpid()))


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[MemoryGroup]:
    """A group of at most `limit_bytes`, page cache included, removed at the end.

    Raises `ConfigError` where this process may not make one.
    """
    kind, parent = _own_folder()
    group = MemoryGroup(parent / f"terrace-{os.getpid()}")
    try:
        group.folder.mkdir()
    except OSError as error:
        raise ConfigError(f"no memory group can be made in {parent}: {error.strerror}; run as root") from error
    try:
        try:
            (group.folder / _LIMITS[kind]).write_text(str(limit_bytes))
        except OSError as error:
            raise ConfigError(
                f"the memory group {group.folder} takes no limit: {error.strerror}; the parent must hand on the memory "
                "controller"
            ) from error
        yield group
    finally:
        group.folder.rmdir()


def _own_folder() -> tuple[str, Path]:
    """Kind of hierarchy, and the folder in it of the memory group that this process is in."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        kind = "cgroup" if "memory" in controllers.split(",") else "" if controllers else "cgroup2"
        for _, place, found, options, *_ in mounts:
            if found == kind and (kind == "cgroup2" or "memory" in options.split(",")):
                folder = Path(place) / path.lstrip("/")
                if (folder / _LIMITS[kind]).exists() or "memory" in _handed_on(folder):
                    return kind, folder
    raise ConfigError("this system has no memory controller of cgroups (v1 or v2) that this process can see")


def _handed_on(folder: Path) -> list[str]:
    file = folder / "cgroup.subtree_control"
    return file.read_text().split() if file.exists() else []
