"""Folders of the `datasets` library: as saved to disk, and as kept on the hub.

`save_to_disk` writes one folder a split with a `state.json` that names its Arrow files and, for several splits, a
`dataset_dict.json` above them. On the hub a split's files are called `train-00000-of-00002.parquet`.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError, did_you_mean
from terrace.base.foreign import leaves, read_file
from terrace.base.parsing import parse_json

_STATE, _SPLITS = "state.json", "dataset_dict.json"
_SHARD = re.compile(r"(\w[\w.-]*?)-\d+-of-\d+(-[0-9a-f]+)?\.(parquet|arrow|jsonl)")


def dataset_files(root: Path, split: str) -> list[Path] | None:
    """Arrow files of a folder written by `save_to_disk`; None for any other folder.

    Raises `DataError` for a missing split and for files that are missing or damaged.
    """
    if (root / _SPLITS).is_file():
        there = _strings(root / _SPLITS, _read(root / _SPLITS).get("splits"))
        chosen = root / _chosen(root, split, there)
        if leaves(chosen, root):
            raise _damaged(root / _SPLITS, f"its split {chosen.name} lies elsewhere")
        return _saved(chosen)
    if (root / _STATE).is_file():
        if split:
            raise DataError(f"data.split = {split!r} has no effect: {root} holds one split; leave it out")
        return _saved(root)
    return None


def of_split(root: Path, files: list[Path], split: str) -> list[Path]:
    """Files of one split if file names name their split; else all files."""
    # The hub puts the split into the file name.
    splits = {file: found[1] for file in files if (found := _SHARD.fullmatch(file.name))}
    there = sorted(set(splits.values()))
    if not there or (len(there) == 1 and not split):
        if split:
            raise DataError(f"data.split = {split!r} has no effect: {root} is not cut into splits; leave it out")
        return files
    chosen = _chosen(root, split, there)
    return [file for file in files if splits.get(file) == chosen]


def _chosen(root: Path, split: str, there: list[str]) -> str:
    # Several splits without a choice: "train", whose absence is then the error.
    wanted = split or ("train" if "train" in there or len(there) != 1 else there[0])
    if wanted not in there:
        raise DataError(
            f"{root} has the splits {', '.join(there) or 'none'}, not {wanted!r}{did_you_mean(wanted, there)}; "
            "choose one with --data.split NAME"
        )
    return wanted


def _saved(folder: Path) -> list[Path]:
    state = folder / _STATE
    entries = _read(state).get("_data_files")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise _damaged(state, "it has no list _data_files")
    files = [folder / name for name in _strings(state, [entry.get("filename") for entry in entries])]
    for file in files:
        if leaves(file, folder):
            raise _damaged(state, f"it names {file.name}, which lies elsewhere")
        # A partly copied data set must not become a smaller corpus.
        if not file.is_file():
            raise DataError(f"{state} names {file.name}, which is missing; copy the whole folder again")
    if not files:
        raise DataError(f"the data set {folder} is empty: {state.name} names no files")
    return files


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
