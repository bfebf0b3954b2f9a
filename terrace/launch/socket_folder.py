"""Folder of the fork server's socket: removed at the end of its process, or by the next start if that was killed.

`multiprocessing` would make one that a killed process leaves for good. The owner holds a lock on its folder, which the
kernel releases however the owner ends.
"""

import fcntl
import multiprocessing.process
import os
import shutil
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

_OWNED, _NEW = "terrace-ranks-", "terrace-new-"


def use_socket_folder() -> None:
    """Has `multiprocessing` make the sockets of this process in a folder of ours, and removes folders of killed
    processes of this user. Does nothing where `multiprocessing` has a folder already.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        return
    clear_abandoned(Path(tempfile.gettempdir()))
    folder = _owned_folder()
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    config["tempdir"] = str(folder)


def _owned_folder() -> Path:
    while True:
        new = Path(tempfile.mkdtemp(prefix=_NEW))
        # Another start may take it for abandoned until it is locked: then a new one is made.
        with suppress(FileNotFoundError):
            # Open until this process ends, for its lock. Renamed when locked, so that nobody takes it for abandoned.
            handle = os.open(new, os.O_RDONLY | os.O_CLOEXEC)
            with suppress(OSError):  # where there are no locks, nobody takes a folder for abandoned
                fcntl.flock(handle, fcntl.LOCK_EX)
            return new.rename(new.with_name(_OWNED + new.name.removeprefix(_NEW)))


def clear_abandoned(parent: Path) -> None:
    """Removes the folders in `parent` whose owners have ended, and those that never had one."""
    for folder in (*parent.glob(f"{_OWNED}*"), *parent.glob(f"{_NEW}*")):
        with suppress(OSError):  # of another user, in use, or removed meanwhile
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                if os.fstat(handle).st_uid == os.getuid():
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    # Nothing is written in a folder that has no owner yet.
                    if folder.name.startswith(_NEW):
                        folder.rmdir()
                    else:
                        shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(handle)
