"""Parts of a run folder that runs of all kinds have."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

_LONGEST_TEXT = 200_000  # characters shown of a settings file or a sample

T = TypeVar("T")


def steady(records: Sequence[T]) -> Sequence[T]:
    """Records of steps without the first ones, which warm up caches."""
    return records[min(len(records) // 4, 10) :]


def checkpoint_rows(folder: Path, missing: list[str]) -> list[tuple[str, int, str]]:
    """(Name, bytes, state) of each checkpoint; says in `missing` that none is complete."""
    found = []
    for path in sorted((folder / "checkpoints").glob("*")):
        if path.is_dir():
            # The manifest is written last: without it the checkpoint is incomplete.
            whole = (path / "manifest.json").is_file()
            size = sum(map(_size, path.rglob("*")))
            found.append((path.name, size, "complete" if whole else "incomplete"))
    if not any(state == "complete" for _, _, state in found):
        missing.append("a checkpoint: none is complete, so this run cannot be resumed")
    return found


def _size(path: Path) -> int:
    # A run that goes on removes old checkpoints while they are counted.
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def text_of(path: Path) -> str:
    """The beginning of a file; empty for one that cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")[:_LONGEST_TEXT]
    except OSError:
        return ""
