"""Files of folders that a stranger may have made: model folders, checkpoints, run folders.

A file there is read only if it is a regular file of bounded size that lies in its folder. A pipe or a device could hold
the reader for ever or fill its memory, and a link could lead to any file of the user, whose text would then stand in an
exported folder or on a page. The links of the Hugging Face cache are the exception: there a model's folder,
`snapshots/REVISION`, has links to `../../blobs`.

A file that the user names is the user's own, links included. Where the name is only the beginning (a folder, a prefix),
the files found from there are a stranger's.
"""

import errno
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

_SMALL_BYTES = 256 << 20  # of a file of settings, a tokenizer or a picture of a step
_LINES_BYTES = 1 << 30  # of a file of lines: 500,000 steps have about as many
_LINE_BYTES = 4 << 20
_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
    stat.S_IFDIR: "a folder",
}


def open_file(path: Path, within: Path | None = None) -> BufferedReader:
    """Open a regular file for reading; `within` is the folder that it must not leave.

    Raises `OSError`, whose `strerror` says what the path is instead.
    """
    real = path if within is None else _inside(path, within)
    # Not blocking, since to open a pipe is to wait for its writer. Links are resolved: none may be put there meanwhile.
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
    """Raise `OSError` as `open_file` does; before a library opens the file by its name."""
    open_file(path, within).close()


def read_file(path: Path, within: Path | None = None, most: int = _SMALL_BYTES) -> bytes:
    """Content of a regular file of at most `most` bytes; raises `OSError`."""
    with open_file(path, within) as file:
        raw = file.read(most + 1)
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"it has more than {most >> 20} MB, which no such file needs", str(path))
    return raw


def read_text(path: Path, within: Path | None = None, most: int = _SMALL_BYTES) -> str:
    """Text of a regular file of at most `most` bytes, with U+FFFD for what is no UTF-8; raises `OSError`."""
    return read_file(path, within, most).decode("utf-8", errors="replace")


def read_lines(path: Path, within: Path | None = None) -> Iterator[str]:
    """The lines of a file, one in memory at a time; raises `OSError`.

    Of a line of more than 4 MB only the beginning comes, which is no JSON: it counts as damaged.
    """
    with open_file(path, within) as file:
        if os.fstat(file.fileno()).st_size > _LINES_BYTES:
            raise OSError(errno.EFBIG, f"it has more than {_LINES_BYTES >> 20} MB, which no run writes", str(path))
        while line := file.readline(_LINE_BYTES):
            yield line.decode("utf-8", errors="replace")
            while len(line) == _LINE_BYTES and not line.endswith(b"\n"):
                line = file.readline(_LINE_BYTES)


def leaves(path: Path, folder: Path) -> bool:
    """Whether a path below `folder` leads out of it, by links or by `..`."""
    real, root = Path(os.path.realpath(path)), Path(os.path.realpath(folder))
    if real.is_relative_to(root):
        return False
    # Compared as it is: `blobs` may be a link itself, in a folder that only looks like the cache.
    revision = next((each for each in (root, *root.parents) if each.parent.name == "snapshots"), None)
    return revision is None or real.parent != revision.parent.parent / "blobs"


def _inside(path: Path, folder: Path) -> Path:
    if leaves(path, folder):
        words = f"it is a link out of {folder}: put a copy of the file there (cp -L)"
        raise OSError(errno.EPERM, words, str(path))
    return Path(os.path.realpath(path))


def _irregular(path: Path, kind: int) -> OSError:
    return OSError(errno.EINVAL, f"it is {_KINDS.get(kind, 'no file')}, not a regular file", str(path))
