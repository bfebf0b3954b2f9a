"""Makes the C library keep the memory of freed activations for the next micro-batch.

By default glibc returns free memory at the top of a heap to the kernel, and gives large buffers their own mappings
until it has adapted to their sizes. Activations are freed and allocated in every micro-batch, and the kernel would
zero new memory page by page. Buffers of whole blocks are managed separately (terrace.runtime.pages), so a heap holds
freed activations.
"""

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_NEVER = -1
_LEAST_BYTES = 1 << 20  # from which initial values have mappings of their own: a guess, above that of any norm
_LARGEST_BYTES = 32 << 20  # the most that glibc takes from a heap


def return_freed_memory() -> bool:
    """Return large buffers to the kernel as they are freed, until `keep_freed_memory`. False if this is not glibc.

    A heap keeps holes between initial values of several blocks, which together take as much as the whole model.
    """
    return _set((_M_MMAP_THRESHOLD, _LEAST_BYTES))


def keep_freed_memory() -> bool:
    """Return free memory to the kernel now and never again in this process. False if the C library is not glibc."""
    return _set((_M_MMAP_THRESHOLD, _LARGEST_BYTES), (_M_TRIM_THRESHOLD, _NEVER))


def _set(*settings: tuple[int, int]) -> bool:
    try:
        library = ctypes.CDLL(None)
        mallopt, trim = library.mallopt, library.malloc_trim
    except (OSError, AttributeError):
        return False
    trim(0)
    done = [mallopt(number, value) for number, value in settings]
    return all(done)
