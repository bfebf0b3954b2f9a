"""Reads text and JSONL files in units: where a file may be cut, and the pieces of a unit.

A text file is one document. Near every `UNIT_BYTES` it is cut after a line end, else before a space, else between two
characters. A JSONL file is cut between lines.
"""

import codecs
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from terrace.base.errors import DataError
from terrace.data.forms import MAX_LINE_BYTES
from terrace.data.pieces import Cutter, DocumentPart, Unit, check_text, cut, json_object, missing_column, unreadable

UNIT_BYTES = 16 << 20  # some seconds of a tokenizer's work
_BLOCK_BYTES = 1 << 20  # read at a time; large enough that Python's cost per block vanishes
_WINDOW_BYTES = 1 << 16  # searched for a place to cut a text


def text_units(file: Path, size: int, unit_bytes: int, separator: str = "") -> list[Unit]:
    """Units of a text file of `size` bytes, with `separator` between its documents; "" makes the file one document."""
    places = [0]
    # If a separator can overlap itself, only reading from the beginning tells which matches count.
    if any(separator.startswith(separator[index:]) for index in range(1, len(separator))):
        unit_bytes = size
    with file.open("rb") as stream:
        for nominal in range(unit_bytes, size, unit_bytes):
            if nominal <= places[-1]:
                continue
            place = _behind(stream, nominal, separator.encode()) if separator else _text_place(stream, nominal)
            if places[-1] < place < size:
                places.append(place)
    ends = [*places[1:], size]
    return [
        Unit(file, "text", first, end, end == size or separator != "", end - first, separator=separator)
        for first, end in zip(places, ends, strict=True)
    ]


def line_units(file: Path, size: int, unit_bytes: int, column: str) -> list[Unit]:
    """Units of a JSONL file of `size` bytes. Raises `DataError` for a line that is too long."""
    places = [0]
    with file.open("rb") as stream:
        for nominal in range(unit_bytes, size, unit_bytes):
            # A long line has passed this cut already.
            if nominal <= places[-1]:
                continue
            place = _line_place(stream, nominal, file)
            if place < size:
                places.append(place)
    ends = [*places[1:], size]
    return [Unit(file, "lines", first, end, True, end - first, column) for first, end in zip(places, ends, strict=True)]


def read_text(unit: Unit) -> Iterator[DocumentPart]:
    """Yields the pieces of a unit of a text file. Raises `DataError` naming the byte that is not UTF-8."""
    if unit.separator:
        yield from _separated(unit)
    else:
        yield from cut(read_blocks(unit), ends_document=unit.ends_document)


def read_lines(unit: Unit) -> Iterator[DocumentPart]:
    """Yields the pieces of the lines in a unit of a JSONL file. A line without text yields a piece without text.

    At most one whole line is in memory. Raises `DataError` for a bad line, naming the file and the line.
    """
    offset = unit.first
    try:
        with unit.file.open("rb") as stream:
            stream.seek(offset)
            number = 0
            while offset < unit.end and (line := stream.readline(MAX_LINE_BYTES + 1)):
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise _too_long(unit.file, offset)
                # Split on newline bytes only: JSON strings may hold U+2028 and the like.
                text = line.decode("utf-8")
                text = text.removeprefix("\ufeff") if offset == 0 else text
                if text and not text.isspace():
                    yield from cut([_text_of(text, unit, number)])
                offset += len(line)
    except OSError as error:
        raise unreadable(unit.file, error) from error
    except UnicodeDecodeError as error:
        where = f"{unit.file} line {_line_number(unit.file, offset)}"
        raise not_utf8(unit.file, offset + error.start, error, where) from error


def not_utf8(file: Path, offset: int, error: UnicodeDecodeError, where: str = "") -> DataError:
    value = error.object[error.start]
    with file.open("rb") as stream:
        # A byte order mark tells UTF-16, the most common mistake, from Latin-1.
        marked = stream.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    return DataError(
        f"data {where or file} is not UTF-8: byte 0x{value:02x} at offset {offset}; convert it, for example "
        f"iconv -f {'utf-16' if marked else 'latin1'} -t utf-8 {file.name} > {file.stem}-utf8{file.suffix}"
    )


def _text_of(line: str, unit: Unit, number: int) -> str:
    def where() -> str:
        return f"{unit.file}:{_line_number(unit.file, unit.first) + number - 1}"

    record = json_object(line, where, '{"text": ...}')
    if unit.column not in record:
        raise missing_column(where(), unit.column, record)
    text = record[unit.column]
    try:
        return check_text(text, unit.column, "line")
    except DataError:
        return check_text(text, unit.column, where())  # counting lines means reading the file, so only on an error


def read_blocks(unit: Unit) -> Iterator[str]:
    """Yields the text of a unit, block by block. Raises `DataError` naming the byte that is not UTF-8."""
    offset, held = unit.first, b""
    try:
        with unit.file.open("rb") as stream:
            stream.seek(offset)
            while block := stream.read(min(_BLOCK_BYTES, unit.end - offset - len(held))):
                # A block may end inside a character; its bytes wait for the next block.
                raw = held + block
                text, used = codecs.utf_8_decode(raw, "strict", False)
                yield text.removeprefix("\ufeff") if offset == 0 else text
                offset, held = offset + used, raw[used:]
            codecs.utf_8_decode(held, "strict", True)  # a character cut off by the end of the file
    except OSError as error:
        raise unreadable(unit.file, error) from error
    except UnicodeDecodeError as error:
        raise not_utf8(unit.file, offset + error.start, error) from error


def _separated(unit: Unit) -> Iterator[DocumentPart]:
    """The pieces of the documents between separators. A line end directly before or after a separator is dropped."""
    cutter, held, is_fresh, any_text = Cutter(), "", unit.first > 0, False
    # The end of what is held may be a line end before a separator, and the beginning of one.
    most_held = len(unit.separator) + 2
    for block in read_blocks(unit):
        *whole, held = (held + block).split(unit.separator)
        for text in whole:
            yield from cutter.feed(_without_first(text, is_fresh).removesuffix("\n").removesuffix("\r"))
            yield from cutter.end()
            is_fresh, any_text = True, False
        if len(held) > 2 * most_held:
            yield from cutter.feed(_without_first(held[:-most_held], is_fresh))
            held, is_fresh, any_text = held[-most_held:], False, True
    last = _without_first(held, is_fresh)
    if last or any_text:
        yield from cutter.feed(last)
        yield from cutter.end()


def _without_first(text: str, is_fresh: bool) -> str:
    """`text` without the line end that follows a separator."""
    return text.removeprefix("\r").removeprefix("\n") if is_fresh else text


def _behind(stream: IO[bytes], nominal: int, separator: bytes) -> int:
    """Offset after the first separator that ends beyond `nominal`, or the end of the file."""
    offset = max(0, nominal - len(separator) + 1)
    stream.seek(offset)
    held = b""
    while block := stream.read(_BLOCK_BYTES):
        held += block
        at = held.find(separator)
        if at >= 0:
            return offset + at + len(separator)
        offset += max(0, len(held) - len(separator) + 1)
        held = held[len(held) - len(separator) + 1 :] if len(held) >= len(separator) else held
    return offset + len(held)


def _text_place(stream: IO[bytes], nominal: int) -> int:
    # Only a small window after the nominal cut is searched for a good place.
    stream.seek(nominal)
    window = stream.read(_WINDOW_BYTES)
    at = window.find(b"\n") + 1
    if at:
        return nominal + at
    at = window.find(b" ")
    if at >= 0:
        return nominal + at
    at = 0
    while at < len(window) and window[at] & 0xC0 == 0x80:  # inside a character
        at += 1
    return nominal + at


def _line_place(stream: IO[bytes], nominal: int, file: Path) -> int:
    # One byte earlier, so that a line that begins exactly at `nominal` counts.
    stream.seek(nominal - 1)
    offset = nominal - 1
    while block := stream.read(_BLOCK_BYTES):
        at = block.find(b"\n")
        if at >= 0:
            return offset + at + 1
        offset += len(block)
        if offset - nominal > MAX_LINE_BYTES:
            raise _too_long(file, nominal)
    return offset


def _too_long(file: Path, offset: int) -> DataError:
    return DataError(
        f"{file}:{_line_number(file, offset)} is longer than {MAX_LINE_BYTES // 10**6} MB; a line is a document: "
        "cut it into several, or give a text file instead"
    )


def _line_number(file: Path, offset: int) -> int:
    # Counted only for error messages, so lines need no index.
    number, left = 1, offset
    with file.open("rb") as stream:
        while left > 0 and (block := stream.read(min(_BLOCK_BYTES, left))):
            number += block.count(b"\n")
            left -= len(block)
    return number
