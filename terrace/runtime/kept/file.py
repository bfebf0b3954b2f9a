"""The file of one rank in which states are kept on a disk, piece by piece.

The file has no name: it is unlinked as it is made, with mode 0600. So no other process opens it, and it is gone when
its process has ended, however that ended. Room for all pieces is claimed at once, so that a full disk is noticed before
the first step. Each piece ends in a mark of 64 bytes:

    8   "TERRKEPT"                      8   how often the piece was written
    16  a random number of this file    8   bytes of the piece without its mark
    8   number of the piece             4   CRC-32 of all bytes before this field

A piece is read in one call and compared with the mark that was last written, so a flipped byte, a write that never
arrived and bytes of another piece or file are noticed, each with its own words. A piece that was never written is zero.

Pages of rows (`PagedFile`) are small pieces that are read and written many at a time: neighbours in the file in one
call, and several calls at once, which a disk answers faster than one after the other. The marks of all pages of a
request are made and compared together.

Direct I/O (open(2), O_DIRECT) moves pieces between the disk and the ring, without a copy in the page cache, which
would take the memory that this file is there to save. Where a file system has none, pieces pass through the cache
and are dropped from it after each call.
"""

import errno
import os
import secrets
import struct
import tempfile
import threading
import weakref
import zlib
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from terrace.base.errors import ConfigError, TrainingError
from terrace.base.words import quantity
from terrace.plan.keep import MARK_BYTES

_MAGIC = b"TERRKEPT"
_MARK = struct.Struct("<8s16sQQQ")  # without the checksum
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
_DIRECT: int = getattr(os, "O_DIRECT", 0)  # Linux has it
_Call = Callable[[int, list[memoryview], int], int]  # preadv(2), pwritev(2)
_AGAIN = "resume from the last checkpoint"
_AT_ONCE = 16  # calls of a disk at a time: a guess; solid-state disks answer as many without delay


class KeptFile:
    """Pieces of `sizes` bytes, multiples of `SECTOR_BYTES`, in a file in `folder`.

    `read` and `write` may be called from one thread each. Raises `ConfigError` if the folder cannot hold the file.
    """

    def __init__(self, folder: Path, sizes: Sequence[int]) -> None:
        self._make(folder, tuple(sizes), (0, *accumulate(sizes)))

    def _make(self, folder: Path, sizes: Sequence[int], starts: Sequence[int]) -> None:
        self.folder, self.sizes, self._starts = folder, sizes, starts
        self.file_system = check_folder(folder)
        self._token, self._versions = secrets.token_bytes(16), array("Q", bytes(8 * len(sizes)))
        self._handle, self.is_direct = _open(folder)
        # What is unusual, for the user.
        self.words = ""
        if not self.is_direct:
            of = f"{self.file_system or 'the file system'} of {folder}"
            self.words = f"kept states pass the page cache: {of} has no direct I/O"
        self._closed = weakref.finalize(self, os.close, self._handle)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        _claim(self._handle, self._starts[-1], folder)

    def read(self, number: int, memory: memoryview) -> None:
        """Fill `memory` with a piece. Raises `TrainingError` if it is not what was last written."""
        with self._reading:
            piece = memory[: self.sizes[number]]
            self._fill(number, piece)
            self._check(number, piece)

    def write(self, number: int, memory: memoryview) -> None:
        """Store a piece; the last `MARK_BYTES` of it are overwritten. Raises `TrainingError` if the disk refuses."""
        with self._writing:
            piece = memory[: self.sizes[number]]
            self._versions[number] += 1
            piece[-MARK_BYTES:] = self._mark(number, piece)
            self._store(number, piece)

    def close(self) -> None:
        """Give the file's room back. A lane that still runs after an error fails at its next piece."""
        # Not within a call: the number of the handle may soon be that of another file.
        with self._reading, self._writing:
            self._closed()
            self._handle = -1

    def _fill(self, number: int, memory: memoryview) -> None:
        start, size, done = self._starts[number], len(memory), 0
        while done < size:
            count = self._call(os.preadv, memory[done:], start + done, "read")
            if not count:
                raise TrainingError(
                    f"the file of kept states in {self.folder} ends after {start + done} of {self._starts[-1]} bytes: "
                    f"the disk lost a part of it; {_AGAIN}"
                )
            done += count
        self._dropped(start, size)

    def _store(self, number: int, memory: memoryview) -> None:
        start, size, done = self._starts[number], len(memory), 0
        while done < size:
            done += self._call(os.pwritev, memory[done:], start + done, "written")
        self._dropped(start, size)

    def _check(self, number: int, memory: memoryview) -> None:
        if wrong := self._wrong(number, memory):
            raise TrainingError(f"piece {number} of the kept states in {self.folder} {wrong}; {_AGAIN}")

    def _mark(self, number: int, memory: memoryview) -> bytes:
        size = len(memory) - MARK_BYTES
        mark = _MARK.pack(_MAGIC, self._token, number, self._versions[number], size)
        checksum = zlib.crc32(mark, zlib.crc32(memory[:size]))
        return (mark + struct.pack("<I", checksum)).ljust(MARK_BYTES, b"\0")

    def _wrong(self, number: int, memory: memoryview) -> str:
        """What is wrong with a piece that was read; "" if it is what was last written."""
        found = bytes(memory[-MARK_BYTES:])
        if not self._versions[number]:
            return "has bytes that nobody wrote" if bytes(memory).count(0) < len(memory) else ""
        expected = self._mark(number, memory)
        if found == expected:
            return ""
        magic, token, place, version, _ = _MARK.unpack_from(found)
        if magic != _MAGIC:
            return "has no mark: it was overwritten, or its write never arrived"
        if token != self._token:
            return "is of another run"
        if place != number:
            return f"is piece {place}: the disk returned other bytes than were asked for"
        if version != self._versions[number]:
            return f"was written {version} times, not {self._versions[number]}: a write never arrived"
        return "was damaged on the disk: its checksum differs"

    def _call(self, call: _Call, memory: memoryview, start: int, done: str) -> int:
        try:
            return call(self._handle, [memory], start)
        except OSError as error:
            raise TrainingError(
                f"kept states cannot be {done} in {self.folder}: {error.strerror}; free space or repair the disk, and "
                f"{_AGAIN}"
            ) from error

    def _dropped(self, start: int, size: int) -> None:
        if not self.is_direct:
            os.posix_fadvise(self._handle, start, size, os.POSIX_FADV_DONTNEED)


class PagedFile(KeptFile):
    """Pieces of the same size, `num_pages` of `page_bytes`, of which many are read or written together.

    Shape legend: n pages of a request, in ascending order; a mark has 8 words of 8 bytes, of which word 6 is the
    checksum.
    """

    def __init__(self, folder: Path, page_bytes: int, num_pages: int) -> None:
        self._make(folder, _Equal(page_bytes, num_pages), range(0, (num_pages + 1) * page_bytes, page_bytes))
        self._counts = torch.frombuffer(self._versions, dtype=torch.int64)  # the same memory
        self._summed = page_bytes - MARK_BYTES + _MARK.size  # bytes of a page that its checksum covers
        self._fresh_sum = zlib.crc32(bytes(self._summed))  # of a page that was never written
        self._pool = ThreadPoolExecutor(_AT_ONCE, "terrace-pages")

    def read_pages(self, numbers: Tensor, places: Tensor, memory: memoryview) -> None:
        """Read pages (n), each into its place (n) in `memory`, counted in pages. Raises `TrainingError` as `read`."""
        with self._reading:
            sums, expected = torch.tensor(self._each(self._read_run, numbers, places, memory)), self._marks(numbers)
            expected[:, 6] = sums
            expected[self._counts[numbers] == 0] = 0
            is_wrong = (self._found(memory)[places] != expected).any(1)
            is_wrong |= (self._counts[numbers] == 0) & (sums != self._fresh_sum)
            for index in is_wrong.nonzero().flatten().tolist():
                start = int(places[index]) * self.sizes[0]
                self._check(int(numbers[index]), memory[start : start + self.sizes[0]])

    def write_pages(self, numbers: Tensor, places: Tensor, memory: memoryview) -> None:
        """Store pages (n), each from its place (n) in `memory`. Raises `TrainingError` as `write`."""
        with self._writing:
            self._counts[numbers] += 1
            self._found(memory)[places] = self._marks(numbers)
            self._each(self._write_run, numbers, places, memory)

    def close(self) -> None:
        super().close()
        self._pool.shutdown(wait=False)

    def _found(self, memory: memoryview) -> Tensor:
        """The marks of the pages in `memory` (places, 8)."""
        return torch.frombuffer(memory, dtype=torch.int64).view(-1, self.sizes[0] // 8)[:, -MARK_BYTES // 8 :]

    def _marks(self, numbers: Tensor) -> Tensor:
        """The marks of pages without their checksums (n, 8)."""
        head = _MARK.pack(_MAGIC, self._token, 0, 0, self.sizes[0] - MARK_BYTES).ljust(MARK_BYTES, b"\0")
        marks = torch.frombuffer(bytearray(head), dtype=torch.int64).repeat(len(numbers), 1)
        marks[:, 3], marks[:, 4] = numbers, self._counts[numbers]
        return marks

    def _read_run(self, number: int, memory: memoryview) -> list[int]:
        """Read neighbours from page `number` on. Returns the checksum of each."""
        self._fill(number, memory)
        return [zlib.crc32(memory[at : at + self._summed]) for at in range(0, len(memory), self.sizes[0])]

    def _write_run(self, number: int, memory: memoryview) -> list[int]:
        """Write neighbours, whose marks are there but for the checksums. Returns nothing."""
        for at in range(0, len(memory), self.sizes[0]):
            struct.pack_into("<I", memory, at + self._summed, zlib.crc32(memory[at : at + self._summed]))
        self._store(number, memory)
        return []

    def _each(
        self, call: Callable[[int, memoryview], list[int]], numbers: Tensor, places: Tensor, memory: memoryview
    ) -> list[int]:
        """Call a function for the pages of a request, neighbours together. Returns all that it returned, in order."""
        bounds = torch.arange(_AT_ONCE) * len(numbers) // _AT_ONCE  # a thread has a range of the pages
        apart = (numbers.diff() != 1) | (places.diff() != 1)
        starts = torch.unique_consecutive(torch.cat([bounds, apart.nonzero().flatten() + 1]).sort().values)
        stops = torch.cat([starts[1:], torch.tensor([len(numbers)])])
        begins = places[starts] * self.sizes[0]
        ends = begins + (stops - starts) * self.sizes[0]
        runs = list(zip(numbers[starts].tolist(), begins.tolist(), ends.tolist(), strict=True))
        firsts = [*torch.searchsorted(starts, torch.unique_consecutive(bounds)).tolist(), len(runs)]

        def work(first: int, last: int) -> list[int]:
            return [each for number, begin, end in runs[first:last] for each in call(number, memory[begin:end])]

        # Raises the first error.
        return [each for found in self._pool.map(work, firsts[:-1], firsts[1:]) for each in found]


class _Equal(Sequence[int]):
    """A number that repeats."""

    def __init__(self, value: int, number: int) -> None:
        self._value, self._number = value, number

    def __len__(self) -> int:
        return self._number

    def __getitem__(self, index: Any) -> Any:
        return self._value


def scratch(folder: Path, num_bytes: int) -> mmap:
    """Memory that a file without a name backs, private to this process as the file of states is."""
    handle, name = tempfile.mkstemp(prefix=".kept-", dir=folder)
    try:
        os.unlink(name)
        _claim(handle, num_bytes, folder)
        return mmap(handle, num_bytes)  # which holds on to the file
    finally:
        os.close(handle)


def _open(folder: Path) -> tuple[int, bool]:
    """An open file without a name, and whether it takes direct I/O."""
    for flags in dict.fromkeys((_DIRECT, 0)):
        try:
            handle, name = tempfile.mkstemp(prefix=".kept-", dir=folder)  # mode 0600
        except OSError as error:
            raise ConfigError(
                f"cannot keep states in {folder}: {error.strerror}; name another folder as train.keep_folder"
            ) from error
        try:
            if not flags:
                return handle, False
            direct = os.open(name, os.O_RDWR | os.O_CLOEXEC | flags)
        except OSError as error:
            if error.errno != errno.EINVAL:  # of a file system without direct I/O
                raise
            os.close(handle)
            continue
        finally:
            os.unlink(name)
        os.close(handle)
        return direct, True
    raise AssertionError("a file without flags opens")


def _claim(handle: int, size: int, folder: Path) -> None:
    try:
        if size:
            os.posix_fallocate(handle, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        free = os.statvfs(folder)
        raise ConfigError(
            f"{folder} has {quantity(free.f_bavail * free.f_frsize, 'B')} free, and one rank keeps "
            f"{quantity(size, 'B')} there: free space, name a folder on another disk as train.keep_folder, or shard "
            "states over more ranks"
        ) from error


def check_folder(folder: Path) -> str:
    """Name of the file system of a folder that may hold states, such as "ext4"; "" if the system does not tell.

    Raises `ConfigError` if the folder is missing or is a file, or its files are in memory.
    """
    if folder.is_file():
        raise ConfigError(f"cannot keep states in {folder}: it is a file; name a folder as train.keep_folder")
    try:
        device = os.stat(folder).st_dev
    except OSError as error:
        raise ConfigError(
            f"cannot keep states in {folder}: {error.strerror}; name a folder that exists as train.keep_folder"
        ) from error
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    # The fields behind the separator begin with the name (proc_pid_mountinfo(5)).
    names = {line.split()[2]: line.rpartition(" - ")[2].split()[0] for line in lines}
    found = names.get(number, "")
    if found in _IN_MEMORY:
        raise ConfigError(
            f"{folder} is on {found}, whose files are in memory, so that keeping states there saves none: name a "
            "folder on a disk as train.keep_folder"
        )
    return found
