"""Rows in shared memory, for processes of one machine (Linux).

`keep` copies the tensors of rows into an anonymous file (memfd) of this process. Another process of the same user opens
it through `/proc` and maps it, so rows pass between processes with one copy and without the controller. Mappings are
private (copy-on-write): in-place changes stay in their process. The memory is freed when its owner has dropped it or
ended and no process maps it. Only tensor data is read from it.
"""

import mmap
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from terrace.base.errors import ConfigError, HangError
from terrace.rl.values.packing import Packing
from terrace.rl.values.rows import Rows


@dataclass(frozen=True)
class Segment:
    """The place of rows: file descriptor `file` of process `pid`; `inode` detects a reused descriptor."""

    pid: int
    file: int
    inode: int
    packing: Packing


class SharedMemory:
    """A `Store` whose rows other processes of this machine can map."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"roles in local processes need Linux, and this is {sys.platform}: run them inline")

    def keep(self, rows: Rows) -> Segment:
        """Copy rows, from any device, into an anonymous file."""
        packing = Packing.of(rows)
        file = os.memfd_create("rows")
        if packing.num_bytes:
            os.ftruncate(file, packing.num_bytes)
            packing.write(rows, mmap.mmap(file, packing.num_bytes))
        return Segment(os.getpid(), file, os.fstat(file).st_ino, packing)

    def fetch(self, place: Segment) -> Rows:
        """Map rows of this or another process; raises `HangError` if their owner has ended."""
        try:
            file = os.open(f"/proc/{place.pid}/fd/{place.file}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise HangError(f"process {place.pid} has ended, and its rows with it") from error
        try:
            assert os.fstat(file).st_ino == place.inode, "rows are dropped only when nobody will ask for them"
            num_bytes = place.packing.num_bytes
            memory = mmap.mmap(file, num_bytes, access=mmap.ACCESS_COPY) if num_bytes else b""
        finally:
            os.close(file)
        return place.packing.read(memory)

    def part(self, place: Segment, start: int, stop: int, columns: Sequence[str] = ()) -> Segment:
        """The same file with the packing restricted by `Packing.part`."""
        return replace(place, packing=place.packing.part(start, stop, columns))

    def drop(self, place: Segment) -> None:
        """Close the file; existing mappings stay valid."""
        os.close(place.file)
