"""The garbage collector, kept away from work that makes many values and no circles of them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_kept = False


def keep_all() -> None:
    """Take all objects that are alive out of the garbage collector's sight until the process ends.

    For a process that has imported much and lives long: a full collection would walk over all of it each time.
    """
    global _kept
    gc.freeze()
    _kept = True


@contextmanager
def no_collection() -> Iterator[None]:
    """Where nearly all objects that are made are kept, the garbage collector finds nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            # Into the oldest generation, or the next collection of the youngest would walk over all of them.
            if not _kept:  # it would come back into sight
                gc.freeze()
                gc.unfreeze()
            gc.enable()
