"""Pages of host memory mapped at several virtual addresses (Linux: mappings of an anonymous file).

    memfd_create     creates the file; a page takes physical memory when it is first written
    mmap PROT_NONE   reserves a range of addresses
    mmap MAP_FIXED   maps pages of the file into a range; one page may be mapped into many ranges
    PUNCH_HOLE       returns the physical memory to the system

The kernel limits the number of mappings of a process. It merges adjacent mappings of consecutive pages into one.
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
_SPARE_SHARE = 10  # one tenth of the mappings is left for the rest of the process; a guess


class OutOfMappingsError(Exception):
    """The process has reached the system's limit of mappings."""


class VirtualMemory(Protocol):
    """Physical pages, and address ranges into which they are mapped."""

    whole: Tensor  # all pages in order, uint8
    num_mappings: int  # lower bound on the mappings that `map` can still create

    def reserve(self) -> tuple[int, Tensor]:
        """Reserve a range large enough for all pages. Returns its address and a uint8 view.

        Only mapped pages of the view may be accessed.
        """
        ...

    def map(self, address: int, index: int, page: int, count: int) -> None:
        """Map `count` pages from `page` on at page index `index` of a range. Raises `OutOfMappingsError`."""

    def clear(self, address: int) -> None:
        """Unmap all pages of a range."""

    def give_back(self) -> None:
        """Free the physical memory of all pages; their content is lost. No range may have pages mapped."""

    def take_back(self) -> None:
        """Allocate physical memory again after `give_back`."""


class HostMemory:
    """`num_pages` pages of `page_bytes` in host memory on Linux. A page takes memory when it is first written.

    Raises `ConfigError` on other systems, if the system refuses the file or the address range, and if `page_bytes` is
    not a multiple of the system's page size.
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
        # Tensors do not own this memory; it is freed with this object.
        weakref.finalize(self, _release, self._libc, self._file, self._ranges, self._size)
        try:
            self.whole = self._range(self._file)[1]
        except OutOfMappingsError as error:
            raise ConfigError(f"no room for the addresses of {self._size} bytes: {error}") from error
        self.num_mappings = _num_mappings()

    def reserve(self) -> tuple[int, Tensor]:
        return self._range(-1)

    def map(self, address: int, index: int, page: int, count: int) -> None:
        size = self._page_bytes
        self._mmap(address + index * size, count * size, self._file, page * size)

    def clear(self, address: int) -> None:
        # Reserving the range again replaces all mappings in it.
        self._mmap(address, self._size, -1, 0)

    def give_back(self) -> None:
        if self._libc.fallocate(self._file, _PUNCH_HOLE, 0, self._size):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def take_back(self) -> None:
        """Nothing to do: a page takes memory when it is written."""

    def _range(self, file: int) -> tuple[int, Tensor]:
        address = self._mmap(0, self._size, file, 0)
        self._ranges.append(address)
        return address, torch.frombuffer((ctypes.c_ubyte * self._size).from_address(address), dtype=torch.uint8)

    def _mmap(self, address: int, size: int, file: int, offset: int) -> int:
        """Map `size` bytes of `file`, or reserve addresses only (file -1), at `address`, or anywhere (0)."""
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
