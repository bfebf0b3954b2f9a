"""The garbage collector, kept away from work that makes many values and no circles of them."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            gc.freeze()
            gc.unfreeze()
            gc.enable()
