"""CUDA's virtual memory: pages of main memory that are mapped at several addresses, and who uses them.

A tensor over a range of addresses notes its accesses at the pages that are mapped there, so two streams that reach one
page by two addresses race. An access without a page is reported and ends the run, as it would on a device; a page that
is unmapped must be one that the host knows to be unused.
"""

import ctypes
import mmap
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from terrace.generation.cache_shape import CacheShape
from terrace.generation.cuda_memory import CudaMemory
from terrace.generation.mapped import MappedPages
from tests.support.cuda_driver import Driver
from tests.virtual_cuda.clocks import Timeline
from tests.virtual_cuda.findings import Kind, here, told
from tests.virtual_cuda.machine import Machine
from tests.virtual_cuda.storages import Access, DeviceMemory, bytes_of, record_of

_FIXED = 0x10  # MAP_FIXED, for which Python has no name


class Range:
    """Addresses, and the pages that are mapped there."""

    def __init__(self, machine: Machine, page_bytes: int) -> None:
        self._machine, self._page_bytes = machine, page_bytes
        self.pages: dict[int, DeviceMemory] = {}  # by index in the range
        self._uses: dict[int, dict[int, int]] = defaultdict(dict)  # index -> stream -> its last access by this address

    def access(self, at: Timeline, now: Access) -> None:
        """Note an access by these addresses."""
        for index, part in self._parts(now):
            self.check(index, now.told().format(at.name))
            self._uses[index][now.stream] = now.tick
            self.pages[index].note(at, part)

    def check(self, index: int, words: str) -> None:
        """Report and raise if no page is mapped at an index."""
        if index not in self.pages:
            self._machine.findings.add(Kind.UNMAPPED, f"page {index} of a range: {words} at {told(here())}")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def unmap(self, index: int) -> None:
        """Take a page away."""
        known = self._machine.host.clock
        for stream, tick in self._uses.pop(index, {}).items():
            if known.get(stream, 0) < tick:
                words = f"page {index}, used on {self._machine.name(stream)}, at {told(here())}"
                self._machine.findings.add(Kind.UNMAPPING, words)
        del self.pages[index]

    def _parts(self, now: Access) -> Iterator[tuple[int, Access]]:
        """An access by page, with places in the page."""
        size = self._page_bytes
        if now.form is None:
            for index in range(now.low // size, -(-now.high // size)):
                low, high = max(0, now.low - index * size), min(size, now.high - index * size)
                yield index, now._replace(low=low, high=high)
            return
        by_page: dict[int, set[int]] = defaultdict(set)
        for place in bytes_of(now):
            by_page[place // size].add(place % size)
        for index, places in by_page.items():
            yield index, now._replace(low=min(places), high=max(places) + 1, form=frozenset(places))


class _Handle(NamedTuple):
    """Physical memory: where it is in the file, and its pieces of the least size."""

    offset: int
    pieces: list[DeviceMemory]


class VirtualDriver(Driver):
    """The driver of a machine."""

    page_bytes = mmap.PAGESIZE

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine, self._file = machine, os.memfd_create("pages of the virtual device")
        self._memory: dict[int, _Handle] = {}
        self._file_bytes = 0
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
        self._libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def __del__(self) -> None:
        os.close(self._file)

    def refuse(self, words: str) -> None:
        """Report a call that breaks a rule, and end it."""
        self._machine.findings.add(Kind.PAGES, f"{words} at {told(here())}")
        super().refuse(words)

    def reserved(self, size: int) -> int:
        """The address of a new range, none of which may be used yet."""
        address = self._map(None, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._machine.ranges[address] = Range(self._machine, self.page_bytes)
        return address

    def cuMemCreate(self, handle: Any, size: Any, properties: Any, flags: Any) -> int:  # noqa: N802
        code = super().cuMemCreate(handle, size, properties, flags)
        if not code:
            pieces = [DeviceMemory(self._machine, 0) for _ in range(size.value // self.page_bytes)]
            self._memory[handle._obj.value] = _Handle(self._file_bytes, pieces)
            os.pwrite(self._file, b"\xff" * size.value, self._file_bytes)  # nan: what nobody has written shows
            self._file_bytes += size.value
            self._machine.num_pages += 1
        return code

    def cuMemSetAccess(self, at: Any, size: Any, access: Any, count: Any) -> int:  # noqa: N802
        super().cuMemSetAccess(at, size, access, count)
        handle = self._memory[self.mapped[at.value]]
        self._map(at.value, size.value, mmap.MAP_SHARED | _FIXED, self._file, handle.offset)
        pages, index = self._place(at.value)
        pages.pages |= dict(enumerate(handle.pieces, index))
        return 0

    def cuMemUnmap(self, at: Any, size: Any) -> int:  # noqa: N802
        super().cuMemUnmap(at, size)
        pages, index = self._place(at.value)
        for piece in range(size.value // self.page_bytes):
            pages.unmap(index + piece)
        self._map(at.value, size.value, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED)
        return 0

    def cuMemRelease(self, handle: Any) -> int:  # noqa: N802
        super().cuMemRelease(handle)
        del self._memory[handle.value]
        self._machine.num_pages -= 1
        return 0

    def cuMemAddressFree(self, at: Any, size: Any) -> int:  # noqa: N802
        super().cuMemAddressFree(at, size)
        del self._machine.ranges[at.value]
        self._libc.munmap(at.value, size.value)
        return 0

    def _place(self, address: int) -> tuple[Range, int]:
        first = max(start for start in self.ranges if start <= address)
        return self._machine.ranges[first], (address - first) // self.page_bytes

    def _map(self, at: int | None, size: int, flags: int, file: int = -1, offset: int = 0) -> int:
        protection = mmap.PROT_READ | mmap.PROT_WRITE if file >= 0 else 0
        found = self._libc.mmap(at, size, protection, flags, file, offset)
        assert found != ctypes.c_void_p(-1).value, os.strerror(ctypes.get_errno())
        return int(found)


def mapped_pages(
    shape: CacheShape, num_pages: int, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> MappedPages:
    """A pool of mapped pages on the device, whose machine gets a driver for it."""
    record = record_of(torch.empty(1, device=device))
    assert isinstance(record, DeviceMemory)
    memory = CudaMemory(num_pages, shape.num_bytes(page_tokens, dtype), device, VirtualDriver(record.machine))
    return MappedPages(shape, num_pages, page_tokens, memory, dtype)
