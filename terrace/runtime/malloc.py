"""Large freed buffers go back to the system.

Gathered blocks and gradients come and go on several threads. Left alone, glibc serves them from heaps, one a
thread, that keep what was freed: a process then holds several times what its tensors take. With a fixed
threshold a large buffer is a mapping of its own, and freeing it returns it.
"""

import ctypes

_M_MMAP_THRESHOLD = -3  # of mallopt(3)
_LARGE_BYTES = 2 << 20  # a mapping is zeroed page by page when it is made anew: smaller buffers are kept


def return_large_buffers() -> bool:
    """Tell the C library, if it is glibc; return whether it listens. Holds for the whole process."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES))
