"""From a path to the text of its documents.

A text file is one document, or several with a separator between them. Each record of JSON or csv and each row of a
table is a document. terrace.data.files finds the files. Unreadable or malformed parts of a corpus are never skipped:
they raise errors that name file and line.
"""

from collections.abc import Iterator
from pathlib import Path

from terrace.base.errors import DataError
from terrace.data.files import find_data
from terrace.data.forms import DataFile
from terrace.data.pieces import DocumentPart, Unit, unreadable
from terrace.data.records import read_record_unit
from terrace.data.sources import STDLIB
from terrace.data.tables import read_table_unit, table_units
from terrace.data.text import UNIT_BYTES, line_units, read_lines, read_text, text_units


def read_documents(path: str | Path, column: str = "text", split: str = "", *, separator: str = "") -> Iterator[str]:
    """Yields each non-empty document of the corpus `path` whole, in order.

    Raises `DataError` as `find_documents` and `read_pieces` do.
    """
    parts: list[str] = []
    for piece in read_pieces(path, column, split, separator=separator):
        parts.append(piece.text)
        if piece.ends_document:
            if any(parts):
                yield "".join(parts)
            parts = []


def read_pieces(
    path: str | Path, column: str = "text", split: str = "", *, separator: str = ""
) -> Iterator[DocumentPart]:
    """Yields the documents of the corpus `path` in pieces of bounded size. An empty document yields one piece without
    text.

    `column` is the key, or the column, of the text in a record; `separator` stands between the documents of a text
    file. At most one record of JSON or csv, or a thousand rows of a table, are in memory at a time. Raises `DataError`
    for text that is not UTF-8 (file and byte), a bad line of JSON (file and line), a row without text (file and row),
    and a corpus of white space only.
    """
    has_text = False
    for unit in corpus_units(path, column, split, separator=separator):
        for piece in read_unit(unit):
            # Once true, no further piece is scanned.
            has_text = has_text or not (not piece.text or piece.text.isspace())
            yield piece
    if not has_text:
        raise DataError(f"data {path} holds no text, only white space or empty documents; give it some text")


def corpus_units(path: str | Path, column: str = "text", split: str = "", *, separator: str = "") -> Iterator[Unit]:
    """Yields the units of a corpus, parts that can be read independently, in order.

    Raises `DataError` for a damaged table, a table without the column, and a line that is too long.
    """
    files = find_data(path, split).files
    if column != "text" and not any(file.holds_records for file in files):
        raise DataError(f"data.column = {column!r} has no effect: {path} holds text and no records; leave it out")
    if separator and all(file.holds_records for file in files):
        raise DataError(f"data.separator = {separator!r} has no effect: {path} holds records and no text; leave it out")
    for file in files:
        # Python's own library may hold files in other encodings; they are skipped only there.
        if path != STDLIB or _is_utf8(file.path):
            yield from _units(file, column, separator)


def read_unit(unit: Unit) -> Iterator[DocumentPart]:
    readers = {"text": read_text, "lines": read_lines, "array": read_record_unit, "csv": read_record_unit}
    return readers.get(unit.kind, read_table_unit)(unit)


def _units(file: DataFile, column: str, separator: str) -> list[Unit]:
    try:
        size = file.path.stat().st_size
        if file.form == "text":
            return text_units(file.path, size, UNIT_BYTES, separator)
        if file.form == "lines":
            return line_units(file.path, size, UNIT_BYTES, column)
        # Where a record begins is only known from the beginning of the file.
        if file.form in ("array", "csv"):
            return [Unit(file.path, file.form, 0, size, True, size, column, file.separator)]
        return table_units(file, size, UNIT_BYTES, column)
    except OSError as error:
        raise unreadable(file.path, error) from error


def _is_utf8(file: Path) -> bool:
    try:
        file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    except OSError as error:
        raise unreadable(file, error) from error
    return True
