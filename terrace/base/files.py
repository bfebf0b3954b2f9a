"""Files written whole or not at all."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file in the folder of `path`, which replaces `path` when the body succeeds.

    A reader sees the old file or the new one, never a part. After an error, also an `OSError` of a full disk, the old
    file is untouched.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb", buffering=1 << 20) as file:
            yield file
            # Without this a rename could reach the disk before the contents.
            file.flush()
            os.fsync(file.fileno())
        respect_umask(Path(temporary))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def respect_umask(path: Path) -> None:
    """Gives a file or folder that was made private the mode that its user's umask allows."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())


def _umask() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration):
        # Setting it is the only other way to ask, and another thread may make a file meanwhile.
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def open_own(path: Path, flags: int) -> int:
    """Descriptor of `path` opened with `flags`, never through a link: others may write in a shared folder."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Writes `content` to `path` as `open_atomic` does, and creates the folder.

    The target of a link is replaced, not the link. Raises `OSError`, also for a path that exists and is not a regular
    file, such as a device.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path) as file:
        file.write(raw)


def sync_folder(path: Path) -> None:
    """Makes a rename inside `path` survive a power cut."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
