"""Folders written by `save_to_disk` of the `datasets` library.

Each split is a folder with a `state.json` that names its Arrow files; a set of splits has a `dataset_dict.json` above
them. Versions before 2.0 also saved selections: `state.json` then names files of row numbers, and the data set consists
of those rows of the Arrow files, in that order.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.base.foreign import leaves, read_file
from terrace.base.parsing import parse_json
from terrace.data.forms import DataFile
from terrace.data.splits import choose_split

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_PARTS, _ROWS = "_data_files", "_indices_data_files"


@dataclass(frozen=True)
class Saved:
    files: tuple[DataFile, ...]
    split: str
    others: tuple[str, ...] = ()


def find_saved(root: Path, split: str) -> Saved | None:
    """The split of a folder written by `save_to_disk`; None for any other folder.

    Raises `DataError` for a missing split and for files that are missing or damaged.
    """
    if (root / _SPLITS).is_file():
        there = _strings(root / _SPLITS, _read(root / _SPLITS).get("splits"))
        chosen = choose_split(root, split, there)
        _check_inside(root / _SPLITS, root / chosen)
        return Saved(_files(root / chosen), chosen, tuple(each for each in there if each != chosen))
    if not (root / _STATE).is_file():
        return None
    own = _read(root / _STATE).get("_split")
    if split and split != own:
        raise DataError(f"data.split = {split!r} has no effect: {root} holds one split; leave it out")
    return Saved(_files(root), own if isinstance(own, str) else "")


def selection_parts(state: Path) -> tuple[list[Path], list[Path]]:
    """The Arrow files and the row-number files named by a state.json."""
    table = _read(state)
    return _named(state, table, _PARTS), _named(state, table, _ROWS)


def _files(folder: Path) -> tuple[DataFile, ...]:
    parts, rows = selection_parts(folder / _STATE)
    if not parts:
        raise DataError(f"the data set {folder} is empty: {_STATE} names no files")
    if rows:
        return (DataFile(folder / _STATE, "selection", parts=(*parts, *rows)),)
    return tuple(DataFile(part, "arrow") for part in parts)


def _named(state: Path, table: dict[str, Any], key: str) -> list[Path]:
    entries = table.get(key)
    if entries is None and key == _ROWS:
        return []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _damaged(state, f"it has no list {key}")
    if any(entry.get("skip") or entry.get("take") is not None for entry in entries):
        raise DataError(f"{state} takes a range of rows of a file, which is not read: save the data set again")
    files = [state.parent / name for name in _strings(state, [entry.get("filename") for entry in entries])]
    for file in files:
        _check_inside(state, file)
        # A partly copied data set must not become a smaller corpus.
        if not file.is_file():
            raise DataError(f"{state} names {file.name}, which is missing; copy the whole folder again")
    return files


def _check_inside(path: Path, named: Path) -> None:
    # A data set is untrusted and must not choose files elsewhere on this machine.
    if leaves(named, path.parent):
        raise _damaged(path, f"it names {named.name}, which lies elsewhere")


def _read(path: Path) -> dict[str, Any]:
    try:
        table = parse_json(read_file(path, path.parent))
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(table, dict):
        raise _damaged(path, "it holds no object")
    return table


def _strings(path: Path, values: Any) -> list[str]:
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise _damaged(path, "a list is missing")
    found = list(values)
    if not all(isinstance(value, str) for value in found):
        raise _damaged(path, "a name is no string")
    return found


def _damaged(path: Path, reason: str) -> DataError:
    return DataError(f"{path} is damaged ({reason}); copy the data set again")
