"""The files of a corpus.

A corpus is a text file, a `.jsonl`, `.parquet` or `.arrow` file, a folder of them, a folder saved by the `datasets`
library, or the special name `stdlib`: the source of this machine's Python standard library, real text that is always
available. `stdlib` differs between Python versions and serves for trials, not results.

In a folder, hidden files, unknown suffixes and empty files are skipped, and compressed text is refused.
"""

import os
import re
import stat
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from terrace.base.errors import DataError
from terrace.data.pieces import unreadable
from terrace.data.sources import STDLIB
from terrace.data.splits import dataset_files, of_split

JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
TABLE_SUFFIXES = frozenset({".arrow", ".parquet"})
PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".html"})
SCRIPT_SUFFIXES = frozenset({".py", ".pyi", ".jl", ".js", ".ts", ".sh"})
COMPILED_SUFFIXES = frozenset({".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".java", ".rs"})
KNOWN_SUFFIXES = JSON_LINES_SUFFIXES | TABLE_SUFFIXES | PROSE_SUFFIXES | SCRIPT_SUFFIXES | COMPILED_SUFFIXES
PACKED_SUFFIXES = frozenset({".7z", ".bz2", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"})

# Tests hold files that are wrong on purpose; installed packages are not the library.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def find_documents(path: str | Path, split: str = "") -> list[Path]:
    """Files of the corpus `path`; those of a folder sorted by relative path.

    The string "stdlib" is the special name; a folder of that name is `./stdlib`. `split` chooses a split of a data set;
    if empty, "train" where there are several. Raises `DataError` for a path that is missing, unreadable, compressed,
    empty or without any file of a known suffix, and for a missing split.
    """
    if path == STDLIB:
        return _find_stdlib()
    # Path("") would be the working directory.
    if not os.fspath(path):
        raise DataError(f"data '' is no path; give a text file, a .jsonl file, a folder or {STDLIB!r}")
    root = Path(path)
    status = _status(root)
    if stat.S_ISDIR(status.st_mode):
        return _find_in_folder(root, split)
    if split:
        raise DataError(f"data.split = {split!r} has no effect on the file {root}: leave it out")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data {root} is not a regular file; copy its text into a file and give that")
    if root.suffix.lower() in PACKED_SUFFIXES:
        raise DataError(f"data {root} is packed or binary ({root.suffix}); unpack it to text or .jsonl first")
    # An empty file would only fail later, as a corpus without tokens.
    if status.st_size == 0:
        raise DataError(f"data {root} is empty (0 bytes); give a file with text")
    return [root]


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


def _find_in_folder(root: Path, split: str) -> list[Path]:
    # A saved data set names its own files and their order.
    kept = dataset_files(root, split)
    if kept is not None:
        return kept
    found = []
    for file in _walk(root):
        # Skipping it silently would lose text.
        if _is_packed_text(file):
            raise DataError(f"data {file} is packed; unpack it, or move it out of the data folder")
        if file.suffix.lower() in KNOWN_SUFFIXES:
            found.append(file)
    if not found:
        known = " ".join(sorted(KNOWN_SUFFIXES))
        raise DataError(f"data folder {root} holds no file of a known suffix ({known}); add or rename one")
    filled = []
    for file in found:
        status = _status(file)
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"data {file} is not a regular file; move it out of the data folder")
        if status.st_size > 0:
            filled.append(file)
    if not filled:
        raise DataError(f"data folder {root} holds only empty files; give it a file with text")
    return of_split(root, sorted(filled, key=lambda file: file.relative_to(root).as_posix()), split)


def _walk(root: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        raise unreadable(Path(error.filename), error)

    seen: set[str] = set()
    for folder, folders, names in os.walk(root, followlinks=True, onerror=refuse):
        real = os.path.realpath(folder)
        if real in seen:  # a link back up would loop for ever
            folders.clear()
            continue
        seen.add(real)
        # Sorted, so that which of two links to a folder is taken does not depend on the file system.
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _is_packed_text(file: Path) -> bool:
    """Whether skipping `file` would lose text: `part.jsonl.gz`, but not `logo.gz`."""
    return file.suffix.lower() in PACKED_SUFFIXES and Path(file.stem).suffix.lower() in KNOWN_SUFFIXES


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        url = re.search(r"\w+:/+\S*", str(path))  # one slash, since Path joins two
        if url is not None:
            raise DataError(
                f"data {url[0]} is a URL, and Terrace downloads nothing: download it first and give the file"
            ) from error
        raise DataError(
            f"data {path} does not exist; give a text file, a .jsonl, .parquet or .arrow file, a folder or {STDLIB!r}"
        ) from error
    except OSError as error:
        raise unreadable(path, error) from error
