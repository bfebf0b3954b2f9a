"""Memory of large buffers that come and go: returned to the system, and asked for in large pages.

Gathered blocks and gradients come and go on several threads. By default glibc serves them from heaps, one per
thread, that keep freed memory: a process then holds several times the bytes of its tensors. With a fixed threshold a
large buffer is a mapping of its own, which is returned when it is freed. The kernel zeroes a new mapping page by page,
as it is written; pages of 2 MiB in place of 4 KiB spare most of that work, and no byte is held longer.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from mmap import PAGESIZE

from torch import Tensor

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_MADV_HUGEPAGE = 14  # of madvise(2), on Linux
_LARGE_BYTES = 2 << 20  # a mapping is zeroed page by page when it is made anew: smaller buffers are kept


def return_large_buffers() -> bool:
    """Set the threshold for the whole process; returns whether the C library (glibc) supports it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))


def take_large_pages(buffer: Tensor) -> bool:
    """Advise the kernel to use pages of 2 MiB for a new, unwritten buffer; returns whether it takes the advice.

    Nothing is done for small buffers, for another device, and on systems without such pages.
    """
    storage = buffer.untyped_storage()
    advise = _madvise()
    if advise is None or buffer.device.type != "cpu" or storage.nbytes() < _LARGE_BYTES:
        return False
    # Only pages that are the buffer's own.
    begin, end = storage.data_ptr() + PAGESIZE - 1, storage.data_ptr() + storage.nbytes()
    begin, end = begin - begin % PAGESIZE, end - end % PAGESIZE
    return advise(begin, end - begin, _MADV_HUGEPAGE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    try:
        madvise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return madvise
