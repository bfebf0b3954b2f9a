"""Memory that activations free is kept by the C library for the next micro-batch.

By default glibc returns the top of a heap to the kernel whenever it is free, and large buffers with their own mappings,
until it has learnt their sizes. Activations come and go with every micro-batch, and new memory is zeroed by the kernel
page by page. Buffers of whole blocks are kept apart (terrace.runtime.pages), so a heap holds freed activations.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGEST_BYTES = 32 << 20  # the most that glibc takes from a heap


def keep_freed_memory() -> bool:
    """Return the free memory now, and none from then on, in the whole process; False where the C library is another."""
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
