"""Folders of a test: written from a table, read into one, and damaged."""

from collections.abc import Callable, Mapping
from pathlib import Path


def tree(root: Path, files: Mapping[str, bytes]) -> Path:
    """Write files with these contents below a folder; returns the folder."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def bytes_of(folder: Path) -> dict[str, bytes]:
    """Path and content of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(name: str, length: int) -> Callable[[Path], None]:
    """A damage: of a folder's file only the first bytes are left."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.write_bytes(path.read_bytes()[:length])

    return damage
