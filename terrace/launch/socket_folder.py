"""Folder of the fork server's socket, removed when its process ends, or by the next start if the process was killed.

The folder that `multiprocessing` makes would stay after a kill. The owner holds a lock on its folder, which the kernel
releases however the owner ends.

A socket's path has at most some hundred bytes, and on many clusters TMPDIR takes nearly as many. The folder is then
made elsewhere.
"""

import fcntl
import multiprocessing.process
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

from terrace.base.errors import ConfigError

_OWNED, _NEW = "terrace-ranks-", "terrace-new-"
_OTHERS = ("/tmp", "/var/tmp", "/dev/shm")
_LONGEST = 103 if sys.platform == "darwin" else 107  # bytes of a socket's path
_SOCKET = len(f"/{_OWNED}xxxxxxxx/listener-xxxxxxxx")


def use_socket_folder() -> None:
    """Makes `multiprocessing` create this process's sockets in a folder of ours, and removes folders of this user's
    killed processes. Does nothing if `multiprocessing` already has a folder.
    """
    config: dict[str, Any] = multiprocessing.process.current_process()._config  # type: ignore[attr-defined]
    if config.get("tempdir") is not None:
        return
    folder = _owned_folder()
    Finalize(None, shutil.rmtree, args=(folder, True), exitpriority=-100)
    config["tempdir"] = str(folder)


def short_folders(needed: int) -> list[Path]:
    """Folders for temporary files whose paths are short enough to leave `needed` bytes for a socket, the system's own
    first.
    """
    named = dict.fromkeys((_system_folder(), *_OTHERS))
    return [Path(name) for name in named if os.path.isdir(name) and len(os.fsencode(name)) + needed <= _LONGEST]


def clear_all_abandoned() -> None:
    """Removes the folders of killed processes wherever `use_socket_folder` may have made them."""
    for parent in short_folders(_SOCKET):
        clear_abandoned(parent)


def _system_folder() -> str:
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:  # no folder of the system's can be written to
        return _OTHERS[0]


def _owned_folder() -> Path:
    own = _system_folder()
    why = f"its path has {len(os.fsencode(own))} bytes, of at most {_LONGEST - _SOCKET}"
    for parent in short_folders(_SOCKET):
        clear_abandoned(parent)
        try:
            return _owned_folder_in(parent)
        except OSError as error:  # full, or not this user's to write in
            why = f"{parent}: {error.strerror}"
    raise ConfigError(
        f"the ranks of this machine need a folder for their sockets, and none of {', '.join([own, *_OTHERS])} can be "
        f"one ({why}): set TMPDIR to a folder with a short path and some space"
    )


def _owned_folder_in(parent: Path) -> Path:
    while True:
        new = Path(tempfile.mkdtemp(prefix=_NEW, dir=parent))
        # Until it is locked, another process may remove it as abandoned; then a new one is made.
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
