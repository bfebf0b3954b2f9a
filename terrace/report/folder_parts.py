"""Reads the parts of a run folder that all kinds of runs have."""

import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from terrace.base.foreign import leaves, open_file

_LONGEST_TEXT = 200_000  # characters shown of a settings file or a sample

T = TypeVar("T")


def steady(records: Sequence[T]) -> Sequence[T]:
    """Records without those of the first steps, which warm up caches."""
    return records[min(len(records) // 4, 10) :]


def checkpoint_rows(folder: Path, missing: list[str]) -> list[tuple[str, int, str]]:
    """(Name, bytes, state) of each checkpoint; adds a sentence to `missing` if none is complete.

    Symbolic links out of the folder are not followed, since their targets may be arbitrarily large.
    """
    found = []
    inside = not leaves(folder / "checkpoints", folder)
    for path in sorted((folder / "checkpoints").glob("*")) if inside else ():
        if path.is_dir() and not leaves(path, folder):
            # The manifest is written last: without it the checkpoint is incomplete.
            whole = (path / "manifest.json").is_file()
            size = sum(map(_size, path.rglob("*")))
            found.append((path.name, size, "complete" if whole else "incomplete"))
    if not any(state == "complete" for _, _, state in found):
        missing.append("a checkpoint: none is complete, so this run cannot be resumed")
    return found


def _size(path: Path) -> int:
    # An active run may remove old checkpoints meanwhile.
    with suppress(OSError):
        about = path.lstat()
        return about.st_size if stat.S_ISREG(about.st_mode) else 0
    return 0


def text_of(folder: Path, name: str) -> str:
    """The beginning of a run folder's file; empty if it cannot be read."""
    try:
        with open_file(folder / name, folder) as file:
            # A UTF-8 character has at most four bytes.
            return file.read(4 * _LONGEST_TEXT).decode("utf-8", errors="replace")[:_LONGEST_TEXT]
    except OSError:
        return ""
