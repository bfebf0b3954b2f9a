"""Reads records from files: JSON lines and lists, rows of csv and of tables.

A JSON list is read record by record; a csv row may span several lines. All csv values are strings, as written: an empty
one is "", and "NA" is text.
"""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.base.parsing import whole_number
from terrace.data.forms import MAX_LINE_BYTES, DataFile
from terrace.data.pieces import DocumentPart, Unit, check_text, cut, json_object, kind_of, missing_column, unreadable
from terrace.data.tables import table_records
from terrace.data.text import not_utf8, read_blocks

_FORM = '{"text": ...}'


def read_record_unit(unit: Unit) -> Iterator[DocumentPart]:
    """Yields the pieces of the texts in a JSON list or a csv file. A record without text yields a piece without text.

    Raises `DataError` naming the file and the record.
    """
    rows = array_records(unit.file) if unit.kind == "array" else csv_rows(unit.file, unit.separator)
    for record, where in rows:
        if unit.column not in record:
            raise missing_column(where, unit.column, record)
        yield from cut([check_text(record[unit.column], unit.column, where)])


def records(file: DataFile, columns: tuple[str, ...], form: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the records of `file`, each with its place. Of a table only the existing ones of `columns` are read.

    Raises `DataError` for a file or a record that cannot be read; `form` describes the expected record.
    """
    if file.form == "lines":
        for line, where in _lines(file.path):
            yield _object(line, where, form), where
    elif file.form == "array":
        yield from array_records(file.path)
    elif file.form == "csv":
        yield from csv_rows(file.path, file.separator)
    else:
        yield from table_records(file, columns)


def _lines(file: Path) -> Iterator[tuple[str, str]]:
    try:
        with file.open("rb") as stream:
            for number, raw in enumerate(stream, start=1):
                where = f"{file}:{number}"
                try:
                    # Only the first line may begin with a byte order mark.
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    raise DataError(f"{where} is not UTF-8; convert the file") from error
                if line.strip():
                    yield line, where
    except OSError as error:
        raise unreadable(file, error) from error


def _object(line: str, where: str, form: str) -> dict[str, Any]:
    return json_object(line, lambda: where, form)


def csv_rows(path: Path, separator: str) -> Iterator[tuple[dict[str, str], str]]:
    csv.field_size_limit(MAX_LINE_BYTES)  # of this process; texts are longer than the usual limit
    try:
        reader = csv.reader(_csv_lines(path), delimiter=separator, strict=True)
    except TypeError as error:
        raise DataError(f"{path} has the separator {separator!r}, which must be one character") from error
    header: list[str] = []
    try:
        for row in reader:
            if not row:
                continue
            where = f"{path}:{reader.line_num}"
            if not header:
                header = row
                for name in header:
                    if header.count(name) > 1:
                        raise DataError(
                            f"{path} has the column {name!r} {header.count(name)} times; rename all but one"
                        )
            elif len(row) != len(header):
                raise DataError(
                    f"{where} has {len(row)} fields, and the header has {len(header)}: put fields with {separator!r} "
                    "or line ends in quotes"
                )
            else:
                yield dict(zip(header, row, strict=True)), where
    except csv.Error as error:
        raise DataError(f"{path}:{reader.line_num} is not valid csv ({error}); repair it") from error


def _csv_lines(path: Path) -> Iterator[str]:
    offset = 0
    try:
        with path.open("rb") as stream:
            while line := stream.readline(MAX_LINE_BYTES):
                yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
                offset += len(line)
    except OSError as error:
        raise unreadable(path, error) from error
    except UnicodeDecodeError as error:
        raise not_utf8(path, offset + error.start, error) from error


def array_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields the records of a file that is one JSON list, each with its place. A string becomes a record with a
    "text".
    """
    for number, value in enumerate(_values(path), start=1):
        where = f"{path}: record {number}"
        if isinstance(value, str):
            yield {"text": value}, where
        elif isinstance(value, dict):
            yield value, where
        else:
            raise DataError(f"{where} is {kind_of(value)}; each must be an object {_FORM}")


def _values(path: Path) -> Iterator[Any]:
    decoder, text, number = json.JSONDecoder(parse_int=whole_number), _Ahead(path), 1
    text.take("[")
    if text.next() == "]":
        text.end()
        return
    while True:
        text.next()
        value, end = _decoded(decoder, text, number)
        text.at = end
        yield value
        number += 1
        if text.next() == "]":
            text.end()
            return
        text.take(",")


def _decoded(decoder: json.JSONDecoder, text: "_Ahead", number: int) -> tuple[Any, int]:
    while True:
        try:
            value, end = decoder.raw_decode(text.held, text.at)
            # A number at the end of the held text may continue.
            if end < len(text.held) or not text.more():
                return value, end
        except (ValueError, RecursionError) as error:
            where = f"{text.path}: record {number}"
            if isinstance(error, RecursionError):
                raise DataError(f"{where} is not valid JSON (brackets are nested too deeply); repair it") from error
            # The record may be incomplete. The held text doubles, so all attempts together cost twice the last one.
            if len(text.held) - text.at > MAX_LINE_BYTES or not text.more():
                reason = getattr(error, "msg", error)
                raise DataError(f"{where} is not valid JSON ({reason}), or the file is cut off; repair it") from error


class _Ahead:
    """The text of a file from the current position on, read as far as needed."""

    def __init__(self, path: Path) -> None:
        self.path, self.held, self.at = path, "", 0
        self._blocks = read_blocks(Unit(path, "array", 0, path.stat().st_size, True, 0))

    def more(self) -> bool:
        """Reads on until at least twice as much text is held. Returns False at the end of the file."""
        found, size, wanted = [self.held[self.at :]], 0, len(self.held) - self.at
        self.at = 0
        while size <= wanted and (block := next(self._blocks, None)) is not None:
            found.append(block)
            size += len(block)
        self.held = "".join(found)
        return size > 0

    def next(self) -> str:
        """The next character that is not white space, without consuming it; "" at the end."""
        while True:
            while self.at < len(self.held):
                if not self.held[self.at].isspace():
                    return self.held[self.at]
                self.at += 1
            if not self.more():
                return ""

    def take(self, wanted: str) -> None:
        found = self.next()
        if found != wanted:
            raise DataError(
                f"{self.path} is not one list of JSON: {found or 'the end of the file'!r} stands where {wanted!r} "
                "should; repair it, or write one object a line"
            )
        self.at += 1

    def end(self) -> None:
        self.take("]")
        if found := self.next():
            raise DataError(f"{self.path} goes on with {found!r} behind its list of JSON; repair it")
