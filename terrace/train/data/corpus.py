"""From a path to the text of its documents.

A corpus is a text file (one document), a `.jsonl` file (one document a line, under the key `text`), a
folder of both, or the special name `stdlib`: the source of the Python standard library of this machine,
real text that is always at hand. `stdlib` differs between Python versions and serves trials, not results.

Nothing of a user's corpus is skipped for being unreadable or malformed: that is an error that names the
place. A folder leaves out hidden files, unknown suffixes and empty files, and refuses packed text.
"""

import codecs
import json
import os
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from terrace.base.errors import DataError

STDLIB = "stdlib"
JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PROSE_SUFFIXES = frozenset({".txt", ".text", ".md", ".rst", ".tex", ".html"})
SCRIPT_SUFFIXES = frozenset({".py", ".pyi", ".jl", ".js", ".ts", ".sh"})
COMPILED_SUFFIXES = frozenset({".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".go", ".java", ".rs"})
KNOWN_SUFFIXES = JSON_LINES_SUFFIXES | PROSE_SUFFIXES | SCRIPT_SUFFIXES | COMPILED_SUFFIXES
TABLE_SUFFIXES = frozenset({".arrow", ".parquet"})
PACKED_SUFFIXES = frozenset({".7z", ".bz2", ".gz", ".tar", ".tgz", ".xz", ".zip", ".zst"}) | TABLE_SUFFIXES

# Tests hold files that are wrong on purpose; installed packages are not the library.
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})

_BLOCK_BYTES = 1 << 20  # read at a time; large enough that Python's cost per block vanishes
_PIECE_CHARACTERS = 1 << 20  # a tokenizer needs some hundred bytes a character, so this bounds memory


@dataclass(frozen=True)
class Piece:
    """A part of a document that is tokenised on its own; most documents are one piece."""

    text: str  # never empty
    ends_document: bool
    trains: bool = True  # whether a model learns to say it; False for a prompt


def find_documents(path: str | Path) -> list[Path]:
    """Return the files of the corpus `path`, those of a folder sorted by relative path.

    The string "stdlib" is the special name; a folder of that name is `./stdlib`. Raises `DataError`
    for a path that is missing, unreadable, packed, empty or without any file of a known suffix.
    """
    if path == STDLIB:
        return _find_stdlib()
    if not os.fspath(path):
        raise DataError(f"data '' is no path; give a text file, a .jsonl file, a folder or {STDLIB!r}")
    root = Path(path)
    status = _status(root)
    if stat.S_ISDIR(status.st_mode):
        return _find_in_folder(root)
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data {root} is not a regular file; copy its text into a file and give that")
    if root.suffix.lower() in PACKED_SUFFIXES:
        raise DataError(f"data {root} is packed or binary ({root.suffix}); unpack it to text or .jsonl first")
    if status.st_size == 0:
        raise DataError(f"data {root} is empty (0 bytes); give a file with text")
    return [root]


def read_documents(path: str | Path) -> Iterator[str]:
    """Yield each document of the corpus `path` whole, in the order of `find_documents`.

    Raises `DataError` as `find_documents` and `read_pieces` do.
    """
    parts: list[str] = []
    for piece in read_pieces(path):
        parts.append(piece.text)
        if piece.ends_document:
            yield "".join(parts)
            parts = []


def read_pieces(path: str | Path) -> Iterator[Piece]:
    """Yield the documents of the corpus `path` in pieces of bounded size; empty documents have none.

    Only a line of a `.jsonl` file is ever whole in memory. Raises `DataError` for text that is not
    UTF-8 (file and byte), a bad line of JSON (file and line) and a corpus of nothing but white space.
    """
    has_text = False
    for file in find_documents(path):
        if path == STDLIB and not _is_utf8(file):
            continue
        is_lines = file.suffix.lower() in JSON_LINES_SUFFIXES
        for blocks in _read_json_lines(file) if is_lines else [_read_text(file)]:
            for piece in _cut(blocks):
                has_text = has_text or not piece.text.isspace()
                yield piece
    if not has_text:
        raise DataError(f"data {path} holds no text, only white space or empty documents; give it some text")


def _find_stdlib() -> list[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NOT_STDLIB]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    found = [file for file in found if file.is_file() and file.stat().st_size > 0]
    if not found:
        raise DataError(f"data {STDLIB!r}: this Python keeps no source in {root}; give a text file instead")
    return sorted(found, key=lambda file: file.relative_to(root).as_posix())


def _find_in_folder(root: Path) -> list[Path]:
    found = []
    for file in _walk(root):
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
    return sorted(filled, key=lambda file: file.relative_to(root).as_posix())


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files below `root` that are not hidden. Links to folders are followed, each folder once."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error)

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
    """Whether leaving `file` out would lose text: `part.jsonl.gz` and `part.parquet`, but not `logo.gz`."""
    suffix = file.suffix.lower()
    inner = Path(file.stem).suffix.lower()
    return suffix in TABLE_SUFFIXES or (suffix in PACKED_SUFFIXES and inner in KNOWN_SUFFIXES)


def _read_text(file: Path) -> Iterator[str]:
    """Yield the text of `file` in blocks, line ends as they are, without a byte order mark."""
    offset, held = 0, b""
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                raw = held + block
                text, used = codecs.utf_8_decode(raw, "strict", False)
                yield text.removeprefix("\ufeff") if offset == 0 else text
                offset, held = offset + used, raw[used:]
            codecs.utf_8_decode(held, "strict", True)  # a character cut off by the end of the file
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(file, offset + error.start, error) from error


def _read_json_lines(file: Path) -> Iterator[list[str]]:
    """Yield the text of each line of `file`, each as a list of one block."""
    offset = 0
    try:
        with file.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                # Split on newline bytes only: JSON strings may hold U+2028 and the like.
                text = line.decode("utf-8")
                text = text.removeprefix("\ufeff") if number == 1 else text
                if not text.isspace() and text:
                    yield [_text_of(text, f"{file}:{number}")]
                offset += len(line)
    except OSError as error:
        raise _unreadable(file, error) from error
    except UnicodeDecodeError as error:
        raise _not_utf8(file, offset + error.start, error) from error


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is not valid JSON ({error}); each line must be an object") from error
    if not isinstance(record, dict):
        raise DataError(f'{where} is a {type(record).__name__}; each line must be an object {{"text": ...}}')
    if "text" not in record:
        keys = ", ".join(repr(key) for key in list(record)[:8]) or "none"
        raise DataError(f"{where} has no key 'text' (keys: {keys}); rename the key that holds the text")
    text = record["text"]
    if not isinstance(text, str):
        kind = type(text).__name__
        raise DataError(f"{where}: 'text' must be a string, not {kind}; convert it or drop the line")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        escape = ascii(text[error.start])
        raise DataError(f"{where}: 'text' holds half a surrogate pair ({escape}); repair the line") from error
    return text


def _cut(blocks: Iterable[str]) -> Iterator[Piece]:
    """Cut one document after a line end where there is one, else before a space, else anywhere.

    Most tokenizers cut at a line end too, so that few ids, if any, differ from those of the uncut
    document. Where the cuts fall depends on the text alone.
    """
    held = ""
    for block in blocks:
        held += block
        start = 0
        while len(held) - start > _PIECE_CHARACTERS:
            end = start + _PIECE_CHARACTERS
            cut = held.rfind("\n", start, end) + 1
            if cut <= start:
                cut = held.rfind(" ", start + 1, end)
            if cut <= start:
                cut = end
            yield Piece(held[start:cut], ends_document=False)
            start = cut
        held = held[start:]
    if held:
        yield Piece(held, ends_document=True)


def _is_utf8(file: Path) -> bool:
    try:
        for _ in _read_text(file):
            pass
    except DataError as error:
        if isinstance(error.__cause__, UnicodeDecodeError):
            return False
        raise
    return True


def _status(path: Path) -> os.stat_result:
    try:
        return path.stat()
    except FileNotFoundError as error:
        raise DataError(
            f"data {path} does not exist; give a text file, a .jsonl file, a folder or {STDLIB!r}"
        ) from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read data {path}: {error.strerror}; check the path and its permissions")


def _not_utf8(file: Path, offset: int, error: UnicodeDecodeError) -> DataError:
    value = error.object[error.start]
    return DataError(
        f"data {file} is not UTF-8: byte 0x{value:02x} at offset {offset}; convert it, for example "
        f"iconv -f latin1 -t utf-8 {file.name} > {file.stem}-utf8{file.suffix}"
    )
