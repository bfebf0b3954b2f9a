"""Suspends the garbage collector during work that creates many objects without reference cycles."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False


def keep_all() -> None:
    """Exclude all existing objects from garbage collection until the process ends (`gc.freeze`).

    For a long-lived process with many imports: every full collection would traverse all of them.
    """
    global _kept
    gc.freeze()
    _kept = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Disable garbage collection in the body, for code that keeps nearly all objects that it creates."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # Move the new objects to the oldest generation; otherwise the next young collection would traverse them.
            if not _kept:  # `unfreeze` would undo `keep_all`
                gc.freeze()
                gc.unfreeze()
            gc.enable()
