"""Memory of a block's gathered parameters and gradients, which are allocated and freed all the time.

Memory that is freed and allocated again is new to the kernel, which zeroes it page by page as it is written. A heap
that keeps it holds several times the bytes of its tensors, since blocks differ in size and activations lie between
them. Here each large CPU buffer keeps its addresses forever, and has pages only while it is filled: filling moves
pages from released buffers of any size (mremap(2)). So autograd may keep views of a buffer, and no more pages are
held than were filled at one time. Other buffers are allocated and freed by torch, in the same storage object.

Some tensors are freed after the forward of their readers and filled again in the backward: a region's gathered input
is gathered again (terrace.runtime.tensor.regathered), a recomputed operation produces its result again
(terrace.runtime.replay). They are marked as *returning*: saving one for the backward costs no memory, so it is better
than saving something smaller derived from it.
"""

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
from mmap import MADV_DONTNEED, MAP_ANONYMOUS, MAP_PRIVATE, PAGESIZE, mmap

import torch
from torch import Tensor

LEAST_BYTES = 1 << 20  # smaller buffers use malloc, which keeps their memory; a guess
_LARGE_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # of madvise(2), on Linux
_NORESERVE = 0x4000  # of mmap(2): addresses without pages are no promise of memory
_MOVE = 1 | 2 | 4  # of mremap(2): MAYMOVE, FIXED, DONTUNMAP


class Pages:
    """The temporary buffers of a rank. Thread-safe: lanes fill buffers, the step releases them.

    Pages that would take filled and kept buffers over `limit_bytes` are returned to the system.
    """

    def __init__(self, limit_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._sizes: dict[int, int] = {}  # address of a buffer -> bytes of its pages
        self._filled: set[int] = set()
        self._kept: dict[int, int] = {}  # address of a buffer that was given back -> bytes left of its beginning
        self._lock = threading.Lock()

    def make(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """A buffer for `fill` and `give`, without memory if its pages can be moved, otherwise from torch."""
        size = _whole_pages(numel * dtype.itemsize)
        if device.type != "cpu" or size < LEAST_BYTES or not _moves_pages():
            return torch.empty(numel, dtype=dtype, device=device)
        try:
            memory = mmap(-1, size + _LARGE_PAGE, flags=MAP_PRIVATE | MAP_ANONYMOUS | _NORESERVE)
        except OSError:  # a limit on addresses
            return torch.empty(numel, dtype=dtype, device=device)
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        skipped = -begin % _LARGE_PAGE
        # Not its end: a large page there would hold more than the buffer.
        _system("madvise")(begin + skipped, size - size % _LARGE_PAGE, _MADV_HUGEPAGE)
        self._sizes[begin + skipped] = size
        self._limit_bytes += PAGESIZE  # the formula counts bytes
        return torch.frombuffer(memory, dtype=dtype, count=numel, offset=skipped)  # holds on to the mapping

    def fill(self, buffer: Tensor) -> None:
        """Give `buffer` its memory, uninitialised."""
        begin = buffer.data_ptr()
        if begin not in self._sizes:
            buffer.untyped_storage().resize_(buffer.nbytes)
            return
        with self._lock:
            self._filled.add(begin)
            end = begin + self._sizes[begin]
            begin += self._kept.pop(begin, 0)
            while begin < end and self._kept:
                begin += self._take(begin, end - begin)

    def _take(self, begin: int, missing: int) -> int:
        # From a buffer of the same size, or else the newest, which may still be in the cache.
        alike = (source for source, size in self._kept.items() if size == missing)
        source = next(alike, None) or next(reversed(self._kept))
        size = self._kept.pop(source)
        taken = min(missing, size)
        if taken < size:
            self._kept[source] = size - taken
        source += size - taken
        if _system("mremap")(source, taken, taken, _MOVE, begin) != begin:
            _system("madvise")(source, taken, MADV_DONTNEED)  # the target gets new pages as it is written
        return taken

    def give(self, buffer: Tensor) -> None:
        """Release the memory of `buffer` until it is filled again."""
        begin = buffer.data_ptr()
        if begin not in self._sizes:
            buffer.untyped_storage().resize_(0)
            return
        with self._lock:
            # One that was never filled has no pages.
            if begin not in self._filled:
                return
            held = sum(self._sizes[each] for each in self._filled) + sum(self._kept.values())
            self._filled.remove(begin)
            if held <= self._limit_bytes:
                self._kept[begin] = self._sizes[begin]
            else:
                _system("madvise")(begin, self._sizes[begin], MADV_DONTNEED)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGESIZE) * PAGESIZE


@cache
def _system(name: str) -> Callable[..., int]:
    function = getattr(ctypes.CDLL(None), name)
    address, size, flags = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    function.argtypes = (address, size, flags) if name == "madvise" else (address, size, size, flags, address)
    function.restype = ctypes.c_int if name == "madvise" else ctypes.c_void_p
    found: Callable[..., int] = function
    return found


@cache
def _moves_pages() -> bool:
    # Linux from 5.7 on; others have other flags, or none.
    if sys.platform != "linux":
        return False
    memory = mmap(-1, 2 * PAGESIZE, flags=MAP_PRIVATE | MAP_ANONYMOUS)
    memory[0] = 7
    begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    moved = _system("mremap")(begin, PAGESIZE, PAGESIZE, _MOVE, begin + PAGESIZE) == begin + PAGESIZE
    return moved and memory[0] == 0 and memory[PAGESIZE] == 7


_MARK = "returns"


def mark_returning(x: Tensor) -> Tensor:
    """Mark x as a tensor whose values will be filled again. Returns x."""
    vars(x)[_MARK] = True
    return x


def is_returning(x: Tensor) -> bool:
    """Whether x, or the tensor that it is a view of, is marked."""
    base = x._base
    return _MARK in vars(x) or (base is not None and _MARK in vars(base))
