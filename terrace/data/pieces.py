"""Documents in pieces of bounded size, and the units of a corpus that are read independently.

A `Unit` is a part of one file. The units of a corpus depend only on its files, so any number of processes gets the same
pieces.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.base.parsing import parse_json
from terrace.data.forms import Form

PIECE_CHARACTERS = 1 << 20  # a tokenizer needs some hundred bytes a character, so this bounds memory
LINE_PIECE_CHARACTERS = 1 << 16  # of a line that is longer
_TURNS = ("messages", "conversations", "conversation")  # keys of conversations: terrace.data.row_forms
_NAMED_KEYS = 8  # enough to see what a record is


@dataclass(frozen=True)
class DocumentPart:
    """A part of a document that is tokenised on its own. Most documents are one piece."""

    text: str  # empty only for an empty document
    ends_document: bool


@dataclass(frozen=True)
class Unit:
    """A part of a file, from `first` to `end`: bytes of text, else row groups or record batches."""

    file: Path
    kind: Form
    first: int
    end: int
    ends_document: bool  # False: its last document continues in the next unit
    num_bytes: int  # of the file, for progress
    column: str = "text"  # the key of a record that holds its text
    separator: str = ""  # of fields of csv, or of the documents of a text


def check_text(text: object, column: str, where: str) -> str:
    """Returns `text`. Raises `DataError` if it is not a string, or cannot be written as UTF-8."""
    if not isinstance(text, str):
        kind = "null" if text is None else type(text).__name__
        fix = 'read conversations with data.format = "chat"' if kind == "list" else "convert it or drop the record"
        raise DataError(f"{where}: {column!r} must be a string, not {kind}; {fix}")
    try:
        # JSON may spell half a surrogate pair, which has no UTF-8.
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        escape = ascii(text[error.start])
        raise DataError(f"{where}: {column!r} holds half a surrogate pair ({escape}); repair the record") from error
    return text


def json_object(line: str, where: Callable[[], str], form: str) -> dict[str, Any]:
    """The object in a line of JSON. Raises `DataError`, which describes the expected `form`, for anything else."""
    try:
        record = parse_json(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where()} is not valid JSON ({error}); each line must be an object") from error
    if not isinstance(record, dict):
        raise DataError(f"{where()} is {kind_of(record)}; each line must be an object {form}")
    return record


def kind_of(value: Any) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string"}.get(
        type(value).__name__, f"of type {type(value).__name__}"
    )


def shown_keys(there: Iterable[object]) -> str:
    """The first keys of a record, or columns of a table, as shown in an error."""
    keys = list(map(repr, there))
    return ", ".join([*keys[:_NAMED_KEYS], *["..."] * (len(keys) > _NAMED_KEYS)]) or "none"


def missing_column(where: str, column: str, there: Iterable[str]) -> DataError:
    """Error for a record, or a file of records, without `column`."""
    there = list(there)
    turns = next((key for key in _TURNS if key in there), "") if column == "text" else ""
    if turns:
        return DataError(
            f"{where} is a conversation by its key {turns!r}, and texts are read: keep one kind in a file, or set "
            'data.format = "chat" where every record has such a key'
        )
    return DataError(
        f"{where} has no key {column!r} (keys: {shown_keys(there)}); name the key with --data.column NAME, or, of one "
        "source of a data.mixture, with a column of its own"
    )


def unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"cannot read data {path}: {error.strerror}; check the path and its permissions")


def cut(blocks: Iterable[str], *, ends_document: bool = True) -> Iterator[DocumentPart]:
    """Cuts one document into pieces: after a line end if there is one, else before a space, else anywhere.

    Most tokenizers also split at line ends, so few ids, if any, differ from those of the uncut document. The cuts
    depend only on the text. A document without text yields one piece without text, unless it is only part of a document
    (`ends_document` False).
    """
    cutter = Cutter()
    for block in blocks:
        yield from cutter.feed(block)
    yield from cutter.end(ends_document=ends_document)


class Cutter:
    """`cut` for blocks fed one by one. After `end` the next document begins."""

    def __init__(self) -> None:
        self._held, self._any_text = "", False

    def feed(self, block: str) -> Iterator[DocumentPart]:
        held, start = self._held + block, 0
        # The rest waits for the next block, so that cuts do not depend on the sizes of blocks.
        while len(held) - start > PIECE_CHARACTERS:
            at = _place(held, start)
            yield DocumentPart(held[start:at], ends_document=False)
            self._any_text, start = True, at
        self._held = held[start:]

    def end(self, *, ends_document: bool = True) -> Iterator[DocumentPart]:
        held, any_text = self._held, self._any_text
        self._held, self._any_text = "", False
        # An empty document still has one piece, which tells its end.
        if held or (ends_document and not any_text):
            yield DocumentPart(held, ends_document=ends_document)


def _place(text: str, start: int) -> int:
    """End of the piece of `text` that begins at `start`."""
    at = text.rfind("\n", start, start + PIECE_CHARACTERS) + 1
    if at > start:
        return at
    # A line that is longer than a piece: short pieces of it keep all cores busy.
    end = start + min(LINE_PIECE_CHARACTERS, PIECE_CHARACTERS)
    at = text.rfind(" ", start + 1, end)
    return at if at > start else end
