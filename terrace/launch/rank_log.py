"""A log file for everything that one rank prints, including its libraries' output (NCCL_DEBUG, C++ warnings)."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = "logs"  # in the run folder
_STDERR = 2
_loud = [_STDERR]  # where messages go that must not be lost in a file


def write_loud(text: str) -> None:
    """Writes to the original stderr of the process, and to the rank's log, if it has one."""
    for descriptor in {_STDERR, _loud[0]}:
        os.write(descriptor, text.encode())


@contextmanager
def rank_log(path: Path | None) -> Iterator[None]:
    """Appends stdout and stderr of this process to `path` while the body runs; None changes nothing.

    File descriptors are redirected, not only Python's streams. An error that leaves the body is printed to the original
    stderr.
    """
    if path is None:
        yield
        return
    path.parent.mkdir(exist_ok=True)
    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(_STDERR)
    os.dup2(log, 1)
    os.dup2(log, _STDERR)
    os.close(log)
    _loud[0] = saved[1]
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        _loud[0] = _STDERR
        for descriptor, own in zip((1, _STDERR), saved, strict=True):
            os.dup2(own, descriptor)
            os.close(own)
