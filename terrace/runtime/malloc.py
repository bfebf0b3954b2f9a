"""Returning large freed buffers to the system.

Gathered blocks and gradients come and go on several threads. By default glibc serves them from heaps, one per
thread, that keep freed memory: a process then holds several times the bytes of its tensors. With a fixed threshold a
large buffer is a mapping of its own, which is returned when it is freed.
"""

import ctypes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES = 2 << 20  # a mapping is zeroed page by page when it is made anew: smaller buffers are kept


def return_large_buffers() -> bool:
    """Set the threshold for the whole process; returns whether the C library (glibc) supports it."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
