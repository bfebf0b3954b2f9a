"""Files from untrusted folders: model folders, checkpoints, run folders.

Such a file is read only if it is a regular file of bounded size inside its folder. A pipe or a device could block the
reader or fill its memory, and a link could expose any file of the user in an exported folder or on a page. Links of the
Hugging Face cache are allowed: there a model's folder, `snapshots/REVISION`, links to `../../blobs`.

A file that the user names is trusted, including links. Files found below a folder or a prefix that the user names are
not.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

_SMALL_BYTES = 256 << 20  # of settings, a tokenizer or the timeline of a step
_LINES_BYTES = 1 << 30  # of a JSON Lines file: about 500,000 steps
_LINE_BYTES = 4 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_file(path: Path, within: Path | None = None) -> BufferedReader:
    """Open a regular file for reading. It must lie inside the folder `within`, if given.

    Raises `OSError`; for another kind of file, `strerror` names the kind.
    """
    real = path if within is None else _inside(path, within)
    # Non-blocking, since opening a pipe would wait for its writer. NOFOLLOW, since links are resolved already.
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY | (0 if within is None else os.O_NOFOLLOW)
    try:
        handle = os.open(real, flags)
    except OSError as error:
        if error.errno == errno.ENXIO:  # of a socket
            raise _irregular(path, stat.S_IFSOCK) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        raise _irregular(path, stat.S_IFMT(mode))
    return os.fdopen(handle, "rb")


def check_file(path: Path, within: Path | None = None) -> None:
    """Raise `OSError` as `open_file` does. Call it before a library opens the file by name."""
    open_file(path, within).close()


def read_file(path: Path, within: Path | None = None, most: int = _SMALL_BYTES) -> bytes:
    """Content of a regular file of at most `most` bytes; raises `OSError`."""
    with open_file(path, within) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB, which no such file needs", str(path))
    return raw


def read_text(path: Path, within: Path | None = None, most: int = _SMALL_BYTES) -> str:
    """Text of a regular file of at most `most` bytes; invalid UTF-8 becomes U+FFFD. Raises `OSError`."""
    return read_file(path, within, most).decode("utf-8", errors="replace")


def read_lines(path: Path, within: Path | None = None) -> Iterator[str]:
    """Iterate over the lines of a file, with one in memory at a time. Raises `OSError`.

    A line of more than 4 MB is truncated, so that it is invalid JSON and counts as damaged.
    """
    with open_file(path, within) as file:
        if os.fstat(file.fileno()).st_size > _LINES_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_LINES_BYTES >> 20} MB, which no run writes", str(path))
        while line := file.readline(_LINE_BYTES):
            yield line.decode("utf-8", errors="replace")
            while len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(_LINE_BYTES)


def leaves(path: Path, folder: Path) -> bool:
    """Whether a path below `folder` leads out of it, through links or `..`."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(root):
        return False
    # `blobs` is not resolved: it may itself be a link, in a folder that imitates the cache.
    revision = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), None)
    return revision is None or real.parent != revision.parent.parent / "blobs"


def _inside(path: Path, folder: Path) -> Path:
    if leaves(path, folder):
        words = f"it is a link out of {folder}: put a copy of the file there (cp -L)"
        raise OSError(errno.EPERM, words, str(path))
    return Path(os.path.realpath(path))


def _irregular(path: Path, kind: int) -> OSError:
    return OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}, not a regular file", str(path))
