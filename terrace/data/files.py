"""The files of a corpus.

A corpus is a file of text or of records, a folder (terrace.data.folder), or the special name `stdlib`: the source of
this machine's Python standard library, real text that is always available. `stdlib` differs between Python versions and
serves for trials, not results.
"""

import os
import re
import stat
import sysconfig
from collections.abc import Iterable
from pathlib import Path

from terrace.base.errors import DataError
from terrace.base.hub import data_folder, fetch_again
from terrace.data.folder import Found, find_in_folder
from terrace.data.forms import PACKED_SUFFIXES, DataFile, data_file
from terrace.data.pieces import unreadable
from terrace.data.sources import STDLIB

# Tests hold files that are wrong on purpose; installed packages are not the library.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_data(path: str | Path, split: str = "") -> Found:
    """The files of the corpus `path` with their forms. For a folder, also a line on what is read and what is left out.

    The string "stdlib" is the special name; a folder of that name is `./stdlib`. `split` chooses a split of a folder:
    NAME, CONFIGURATION:NAME, or CONFIGURATION: alone; if empty, "train". An id of the hub is fetched. Raises
    `DataError` for a path that is missing, unreadable, compressed, empty or without a file of a known form, and for a
    missing split.
    """
    if path == STDLIB:
        return Found(tuple(DataFile(file, "text") for file in _find_stdlib()))
    # Path("") would be the working directory.
    if not os.fspath(path):
        raise DataError(f"data '' is no path; give a file of text or of records, a folder or {STDLIB!r}")
    root = Path(data_folder(os.fspath(path)))
    status = _status(root)
    if stat.S_ISDIR(status.st_mode):
        return find_in_folder(root, split)
    if split:
        raise DataError(f"data.split = {split!r} has no effect on the file {root}: leave it out")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data {root} is not a regular file; copy its text into a file and give that")
    if root.suffix.lower() in PACKED_SUFFIXES:
        raise DataError(f"data {root} is packed or binary ({root.suffix}); unpack it to text or .jsonl first")
    # An empty file would only fail later, as a corpus without tokens.
    if status.st_size == 0:
        raise DataError(f"data {root} is empty (0 bytes); give a file with text")
    try:
        found = data_file(root)
    except OSError as error:
        raise unreadable(root, error) from error
    if found is None:
        raise DataError(
            f"data {root} holds no records: a .json file has one object a line, or one list of objects; write it so, "
            "or rename it to .txt to train on its characters"
        )
    return Found((found,))


def find_documents(path: str | Path, split: str = "") -> list[Path]:
    """Paths of all files that belong to the corpus `path`. Raises as `find_data` does."""
    return [each for file in find_data(path, split).files for each in file.all_paths]


def separators(files: Iterable[DataFile]) -> list[str]:
    """The field separators of csv files. A dataset card may set them, so they are part of a cache's key."""
    return sorted({file.separator for file in files})


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        # In place, so that os.walk does not enter them.
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found = [file for file in found if file.is_file() and file.stat().st_size > 0]
    if not found:
        raise DataError(f"data {STDLIB!r}: this Python keeps no source in {root}; give a text file instead")
    # Sorted by relative path: the same order on every machine.
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        if fetch_again(str(path)):  # a run goes on whose hub cache was emptied
            return path.stat()
        url = re.search(r"\w+:/+\S*", str(path))  # one slash, since Path joins two
        if url is not None:
            raise DataError(
                f"data {url[0]} is a URL, which is not read: download it first and give the file; of the hub, ORG/NAME"
            ) from error
        raise DataError(
            f"data {path} does not exist; give a file of text or of records (JSON, csv, Parquet, Arrow), a folder or "
            f"{STDLIB!r}"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
