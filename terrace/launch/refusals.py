"""Reports errors of a command to the other ranks before they have met. Needs no torch until there is one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from terrace.base.errors import TerraceError
from terrace.launch.launchers import is_launched


@contextmanager
def refusals_told() -> Iterator[None]:
    """Around a command's checks before its ranks join: under a launcher, an error is reported to the other ranks."""
    try:
        yield
    except TerraceError as error:
        if is_launched(os.environ):
            from terrace.launch.start import refuse  # here, as it needs torch

            refuse(error)
        raise
