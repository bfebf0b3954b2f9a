"""Makes the C library keep the memory of freed activations for the next micro-batch.

By default glibc returns free memory at the top of a heap to the kernel, and gives large buffers their own mappings
until it has adapted to their sizes. Activations are freed and allocated in every micro-batch, and the kernel would
zero new memory page by page. Buffers of whole blocks are managed separately (terrace.runtime.pages), so a heap holds
freed activations.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LARGEST_BYTES = 32 << 20  # the most that glibc takes from a heap


def keep_freed_memory() -> bool:
    """Return free memory to the kernel now and never again in this process. False if the C library is not glibc."""
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    return bool(mallopt(_M_MMAP_THRESHOLD, _LARGEST_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _NEVER))
