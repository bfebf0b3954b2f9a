"""Rows in shared memory, for processes of one machine (Linux).

`keep` copies the tensors of rows into a file in memory (memfd) of this process. Another process opens it through
`/proc`, as only processes of the same user may, and maps it: rows go between two processes by one copy, and without the
controller. Mappings are private: a process that changes its rows in place changes nobody else's. The memory is freed
when its owner has dropped it, or ended, and nobody maps it. Only numbers are read from it; the objects of a column
travel with the place, by the links of the processes.
"""

import mmap
import os
import sys
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, HangError
from terrace.rl.ragged import Ragged
from terrace.rl.rows import Column, Rows

_ALIGNMENT = 64  # bytes: a cache line, and no less than any dtype needs


@dataclass(frozen=True)
class Segment:
    """The place of rows: a file of process `pid`, and what is in it.

    `columns` have the dtype, the shape and the first byte of each tensor of a column (of a `Ragged` its values and its
    offsets), or the objects. `inode` tells the file from a later one with the same number.
    """

    pid: int
    file: int
    inode: int
    num_bytes: int
    columns: dict[str, "tuple[_Stored, ...] | _Objects"]


@dataclass(frozen=True)
class _Stored:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


@dataclass(frozen=True)
class _Objects:
    each: tuple[object, ...]


class SharedMemory:
    """A `Store` whose rows other processes of this machine map."""

    def __init__(self) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(
                f"roles in processes of one machine need Linux, and this is {sys.platform}: run them inline"
            )

    def keep(self, rows: Rows) -> Segment:
        """Copy rows, from whatever device, into a file in memory."""
        tensors = [each for column in rows.columns.values() for each in _tensors(column)]
        sizes = [-(-each.numel() * each.element_size() // _ALIGNMENT) * _ALIGNMENT for each in tensors]
        *starts, num_bytes = accumulate(sizes, initial=0)
        file = os.memfd_create("rows")
        os.ftruncate(file, max(1, num_bytes))
        if num_bytes:
            memory = mmap.mmap(file, num_bytes)
            for each, start in zip(tensors, starts, strict=True):
                _at(memory, _Stored(each.dtype, tuple(each.shape), start)).copy_(each)
        places = (_Stored(each.dtype, tuple(each.shape), start) for each, start in zip(tensors, starts, strict=True))
        columns = {
            name: _Objects(column) if isinstance(column, tuple) else tuple(next(places) for _ in _tensors(column))
            for name, column in rows.columns.items()
        }
        return Segment(os.getpid(), file, os.fstat(file).st_ino, num_bytes, columns)

    def fetch(self, place: Segment) -> Rows:
        """Map rows, of this process or another; raises `HangError` where their owner has ended."""
        try:
            file = os.open(f"/proc/{place.pid}/fd/{place.file}", os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise HangError(f"process {place.pid} has ended, and its rows with it") from error
        try:
            assert os.fstat(file).st_ino == place.inode, "rows are dropped only when nobody will ask for them"
            memory = mmap.mmap(file, place.num_bytes, access=mmap.ACCESS_COPY) if place.num_bytes else None
        finally:
            os.close(file)
        return Rows({name: _column(memory, stored) for name, stored in place.columns.items()})

    def drop(self, place: Segment) -> None:
        """Close the file; whoever has mapped it keeps the rows."""
        os.close(place.file)


def _tensors(column: Column) -> tuple[Tensor, ...]:
    if isinstance(column, Ragged):
        return column.values.detach(), column.offsets
    return (column.detach(),) if isinstance(column, Tensor) else ()


def _column(memory: mmap.mmap | None, stored: "tuple[_Stored, ...] | _Objects") -> Column:
    if isinstance(stored, _Objects):
        return stored.each
    tensors = [_at(memory, each) for each in stored]
    return tensors[0] if len(tensors) == 1 else Ragged(tensors[0], tensors[1])


def _at(memory: mmap.mmap | None, stored: _Stored) -> Tensor:
    count = 1
    for size in stored.shape:
        count *= size
    if memory is None or not count:  # torch reads no memory of 0 bytes
        return torch.zeros(stored.shape, dtype=stored.dtype)
    return torch.frombuffer(memory, dtype=stored.dtype, count=count, offset=stored.start).view(stored.shape)
