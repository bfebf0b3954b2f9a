"""Files and folders written whole or not at all."""

import errno
import fcntl
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

_TEMPORARY = re.compile(r"\..+\.\d+\.new", re.DOTALL)
_WRITING, _CONTENT = "writing.lock", "content"  # in a temporary folder


@contextmanager
def open_atomic(path: Path) -> Iterator[IO[bytes]]:
    """Open a temporary file in the folder of `path`, which replaces `path` when the body succeeds.

    A reader sees the old file or the new one, never a part. After an error, including the `OSError` of a full disk, the
    old file is unchanged.
    """
    handle, temporary = _temporary(path)
    # Everything happens while the file is open and therefore locked; afterwards another writer may reuse its name.
    with os.fdopen(handle, "wb", buffering=1 << 20) as file:
        try:
            yield file
            # Without this a rename could reach the disk before the contents.
            file.flush()
            os.fsync(file.fileno())
            respect_umask(temporary)
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise


def _temporary(path: Path) -> tuple[int, Path]:
    # Names are numbered, not random, so that the file of a killed writer is found without listing the folder. A writer
    # holds a lock on its file.
    for number in count():
        temporary = path.with_name(f".{path.name}.{number}.new")
        _remove_abandoned(temporary)
        try:
            handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            continue  # another process writes it
        # Before it was locked, another writer may have removed it as abandoned.
        if _is_locked(handle) and os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)
    raise AssertionError("count() does not end")


@contextmanager
def folder_atomic(path: Path) -> Iterator[Path]:
    """Create a temporary folder, which is renamed to `path` when the body succeeds: a reader sees all of it or nothing.

    It is created in `.NAME.0.new` beside `path`. A lock in there shows that the writer is alive; folders of killed
    writers are removed. Raises `OSError`, also if `path` exists and is not an empty folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, wrapper = _temporary_folder(path)
    try:
        made = wrapper / _CONTENT
        made.mkdir()
        yield made
        os.replace(made, path)
        sync_folder(path.parent)
    finally:
        _remove_wrapper(wrapper)
        os.close(handle)


def _temporary_folder(path: Path) -> tuple[int, Path]:
    for number in count():
        wrapper = path.with_name(f".{path.name}.{number}.new")
        _remove_abandoned_folder(wrapper)
        try:
            wrapper.mkdir(mode=0o700)
        except FileExistsError:
            continue  # another process writes it
        try:
            handle = os.open(wrapper / _WRITING, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except (FileExistsError, FileNotFoundError):
            continue  # removed as abandoned before it had a lock
        if _is_locked(handle) and os.fstat(handle).st_nlink:
            return handle, wrapper
        os.close(handle)
    raise AssertionError("count() does not end")


def _remove_abandoned_folder(wrapper: Path) -> None:
    # Only folders of `folder_atomic` have this file, and nothing else but the content.
    with suppress(OSError):
        if wrapper.is_symlink() or not {each.name for each in wrapper.iterdir()} <= {_WRITING, _CONTENT}:
            return
        handle = os.open(wrapper / _WRITING, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if (wrapper / _WRITING).lstat().st_ino == os.fstat(handle).st_ino:
                _remove_wrapper(wrapper)
        finally:
            os.close(handle)


def _remove_wrapper(wrapper: Path) -> None:
    # The lock goes last: if this process is killed in between, the folder is still recognised as abandoned.
    shutil.rmtree(wrapper / _CONTENT, ignore_errors=True)
    shutil.rmtree(wrapper, ignore_errors=True)


def _is_locked(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # file system without locks: nothing counts as abandoned
    return True


def _remove_abandoned(temporary: Path) -> None:
    # Keeps the file if it is in use or another user's, or if the file system has no locks.
    with suppress(OSError):
        handle = os.open(temporary, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The name may belong to another file by now.
            if temporary.lstat().st_ino == os.fstat(handle).st_ino:
                temporary.unlink()
        finally:
            os.close(handle)


def remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of killed writers from `folder`; every write does this for its own file name."""
    for path in folder.glob(".*.new"):
        if _TEMPORARY.fullmatch(path.name):
            _remove_abandoned(path)


def respect_umask(path: Path) -> None:
    """Set the mode of a file or folder that was created private to what the umask allows."""
    path.chmod((0o777 if path.is_dir() else 0o666) & ~_umask())


def _umask() -> int:
    try:
        status = Path("/proc/self/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("Umask:")).split()[1], 8)
    except (OSError, StopIteration):
        # The only other way to read it is to set it; 0o077 is safe for files that other threads create meanwhile.
        mask = os.umask(0o077)
        os.umask(mask)
        return mask


def open_own(path: Path, flags: int) -> int:
    """Open `path` with `flags` without following links, which others may have put in a shared folder."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def read_bounded(path: Path, most: int = 256 << 20) -> bytes:
    """Content of a small file. Raises `OSError` if it has more than `most` bytes, as an endless device would.

    Pipes are allowed, for process substitution in a shell.
    """
    with path.open("rb") as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB, which no such file needs", str(path))
    return raw


def resolved(path: Path) -> Path:
    """Resolve links. Raises `OSError` for a loop of links.

    `Path.resolve` raises `RuntimeError` for a loop up to Python 3.12, and nothing from 3.13 on.
    """
    try:
        os.stat(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise
    return path.resolve()


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` as `open_atomic` does, and create the folder if needed.

    Replaces the target of a link, not the link. Raises `OSError`, also if `path` exists and is not a regular file.
    """
    path = resolved(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file")
    raw = content.encode("utf-8") if isinstance(content, str) else content
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_atomic(path) as file:
        file.write(raw)


def sync_folder(path: Path) -> None:
    """Flush the folder `path` to disk, so that renames in it survive a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
