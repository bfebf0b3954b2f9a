"""Pages of memory that are seen at several addresses, on Linux: a file without a name, mapped as often as one likes.

    memfd_create     physical memory, page after page; none until it is written
    mmap PROT_NONE   a range of addresses without memory
    mmap MAP_FIXED   pages of the file, put at a place of a range; the same page may stand in many ranges
    PUNCH_HOLE       their memory goes back to the system

The kernel limits how many mappings a process has, and merges those of pages that follow each other in the file and in
the range.
"""

import ctypes
import mmap
import os
import sys
import weakref
from typing import Protocol

import torch
from torch import Tensor

from terrace.base.errors import ConfigError

_FIXED, _NO_RESERVE = 0x10, 0x4000  # MAP_FIXED, MAP_NORESERVE: Python's mmap has no names for them
_PUNCH_HOLE = 0x02 | 0x01  # FALLOC_FL_PUNCH_HOLE, which wants FALLOC_FL_KEEP_SIZE
_FAILED = ctypes.c_void_p(-1).value  # MAP_FAILED
_SPARE_SHARE = 10  # a tenth of all mappings is left to everything else in the process; a guess


class OutOfMappingsError(Exception):
    """The system maps no further page for this process."""


class VirtualMemory(Protocol):
    """Pages, in the order of `whole`, and ranges of addresses that show some of them."""

    whole: Tensor  # all pages, uint8
    num_mappings: int  # that `map` may make beside those there are, at least

    def reserve(self) -> tuple[int, Tensor]:
        """A range with room for all pages, and its bytes, which may be touched where pages are mapped."""
        ...

    def map(self, address: int, place: int, page: int, count: int) -> None:
        """Show pages `page` ... at places `place` ... of a range. Raises `OutOfMappingsError`."""

    def clear(self, address: int) -> None:
        """Show nothing in a range."""

    def give_back(self) -> None:
        """Return the memory of all pages to the system, and their content; no range may show any."""

    def take_back(self) -> None:
        """Have memory again, after `give_back`."""


class HostMemory:
    """`num_pages` pages of `page_bytes` in the memory of a Linux machine; a page takes some when it is first written.

    Raises `ConfigError` where the system has no such files, and for pages that it cannot map.
    """

    def __init__(self, num_pages: int, page_bytes: int) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"{sys.platform} is not known to show pages at several addresses")
        if page_bytes % mmap.PAGESIZE:
            raise ConfigError(f"a page of {page_bytes} bytes is no multiple of the system's {mmap.PAGESIZE}")
        self._page_bytes, self._size = page_bytes, num_pages * page_bytes
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
        self._libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
        try:
            self._file = os.memfd_create("terrace keys and values")
            os.ftruncate(self._file, self._size)
        except OSError as error:
            raise ConfigError(f"no file in memory for {self._size} bytes: {error.strerror}") from error
        self._ranges: list[int] = []
        # Tensors do not own this memory, so it goes with the object that made them.
        weakref.finalize(self, _release, self._libc, self._file, self._ranges, self._size)
        try:
            self.whole = self._range(self._file)[1]
        except OutOfMappingsError as error:
            raise ConfigError(f"no room for the addresses of {self._size} bytes: {error}") from error
        self.num_mappings = _num_mappings()

    def reserve(self) -> tuple[int, Tensor]:
        return self._range(-1)

    def map(self, address: int, place: int, page: int, count: int) -> None:
        size = self._page_bytes
        self._mmap(address + place * size, count * size, self._file, page * size)

    def clear(self, address: int) -> None:
        # One range without memory takes the place of all mappings in it.
        self._mmap(address, self._size, -1, 0)

    def give_back(self) -> None:
        if self._libc.fallocate(self._file, _PUNCH_HOLE, 0, self._size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def take_back(self) -> None:
        """A page that is written takes memory by itself."""

    def _range(self, file: int) -> tuple[int, Tensor]:
        address = self._mmap(0, self._size, file, 0)
        self._ranges.append(address)
        return address, torch.frombuffer((ctypes.c_ubyte * self._size).from_address(address), dtype=torch.uint8)

    def _mmap(self, address: int, size: int, file: int, offset: int) -> int:
        """Map `size` bytes, of a file or without memory (-1), at an address, or anywhere (0)."""
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
        if file < 0:
            protection, flags = 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE  # 0: PROT_NONE
        found: int = self._libc.mmap(address, size, protection, flags | (_FIXED if address else 0), file, offset)
        if found == _FAILED:
            raise OutOfMappingsError(os.strerror(ctypes.get_errno()))
        return found


def _num_mappings() -> int:
    try:
        with open("/proc/sys/vm/max_map_count", encoding="ascii") as limit, open("/proc/self/maps", "rb") as own:
            most = int(limit.read())
            return max(0, most - most // _SPARE_SHARE - sum(1 for _ in own))
    except OSError as error:
        raise ConfigError(f"the limit of mappings cannot be read: {error}") from error


def _release(libc: ctypes.CDLL, file: int, ranges: list[int], size: int) -> None:
    for address in ranges:
        libc.munmap(address, size)
    os.close(file)
