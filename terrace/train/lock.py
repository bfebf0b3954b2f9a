"""A lock on a run folder, so that one run at a time writes to it. The lock ends with its process, even if that is
killed.

Otherwise a job restarted while its predecessor still runs would remove half-written checkpoints, mix the checkpoints of
both, and write to the same metrics.
"""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from terrace.base.errors import CheckpointError
from terrace.base.foreign import leaves

LOCK = ".lock"
_WAIT_S = 5.0  # ranks whose parent was killed notice within seconds
_PAUSE_S = 0.1
_WRITTEN = (".json", ".jsonl", ".toml")  # ends of names that a run writes


@contextmanager
def folder_lock(folder: Path, wait_s: float | None = None) -> Iterator[None]:
    """Holds the lock of a run folder while the body runs.

    Raises `CheckpointError` if another process holds it for longer than `wait_s` (default: some seconds), or if a file
    in the folder is a pipe, which would block, or a link to outside, whose target the run would overwrite. Does nothing
    on a file system without locks, or in a folder that cannot be written.
    """
    _refuse_others(folder)
    try:
        file = (folder / LOCK).open("a")
    except OSError:
        yield  # the next write to the folder raises the error
        return
    # Closing the file, or the end of the process, releases the lock.
    with file:
        _take(file.fileno(), folder, time.monotonic() + (_WAIT_S if wait_s is None else wait_s))
        yield


def _refuse_others(folder: Path) -> None:
    with suppress(OSError):  # the next write to the folder raises the error
        for path in sorted(folder.iterdir()):
            # A user may keep a whole folder, such as that of the checkpoints, on another file system.
            if path.is_symlink() and not path.is_dir() and leaves(path, folder):
                raise CheckpointError(
                    f"{path} is a link out of the run folder, whose target the run would write: put a copy of the file "
                    "there (cp -L), or remove the link"
                )
            if (path.name == LOCK or path.suffix in _WRITTEN) and not (path.is_file() or path.is_dir()):
                raise CheckpointError(
                    f"{path} is a pipe, a socket or a device, and the run would write it: remove it, or name another "
                    "--folder"
                )


def _take(handle: int, folder: Path, until_s: float) -> None:
    with suppress(OSError):  # such as ENOLCK
        while True:
            try:
                # Polled instead of blocking, so that the wait can end with an error.
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError as error:
                if time.monotonic() > until_s:
                    raise CheckpointError(
                        f"another run is writing in {folder}: wait until it has ended, or name another --folder"
                    ) from error
            time.sleep(_PAUSE_S)
