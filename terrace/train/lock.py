"""One run at a time writes a folder: by a lock that ends with the process that holds it, however that ends.

A job that is started again while the one before still runs would else remove its half-written checkpoints, count its
own among the other's, and write into the same metrics.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from terrace.base.errors import CheckpointError

LOCK = ".lock"
_WAIT_S = 5.0  # ranks whose parent was killed notice within seconds
_PAUSE_S = 0.1


@contextmanager
def folder_lock(folder: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Hold a run folder. Raises `CheckpointError` when another process holds it for longer than `wait_s`.

    On a file system that knows no locks, and in a folder that cannot be written, nothing is held.
    """
    try:
        file = (folder / LOCK).open("a")
    except OSError:
        yield  # whoever writes there next says what is wrong
        return
    with file:
        _take(file.fileno(), folder, time.monotonic() + wait_s)
        yield


def _take(handle: int, folder: Path, until_s: float) -> None:
    with suppress(OSError):  # such as ENOLCK
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > until_s:
                    raise CheckpointError(
                        f"another run is writing in {folder}: wait until it has ended, or name another --folder"
                    ) from error
            time.sleep(_PAUSE_S)
