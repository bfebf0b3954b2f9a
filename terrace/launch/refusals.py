"""Refusals of a command before its ranks have met. Needs no torch until one is told."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from terrace.base.errors import TerraceError
from terrace.launch.launchers import is_launched


@contextmanager
def refusals_told() -> Iterator[None]:
    """Around the checks of a command before its ranks join: other ranks of a launcher hear of an error of this one."""
    try:
        yield
    except TerraceError as error:
        if is_launched(os.environ):
            from terrace.launch.start import refuse  # here, as it needs torch

            refuse(error)
        raise
