"""The format of data for which the user names none, by its first record.

A record with a "text" is text. Otherwise, if it has a form of terrace.data.row_forms, it is a conversation or a
preference. Anything else is taken as text, whose reader reports what is wrong. Imports no torch, no numpy.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.data.files import find_data
from terrace.data.records import records
from terrace.data.row_forms import CHAT_COLUMNS, PAIR_COLUMNS, SPELLED, chat_form, is_pair
from terrace.data.sources import STDLIB, Format

_MOST_BYTES = 1 << 24  # of a first line; a longer one is hardly a conversation


def found_format(path: str | Path, split: str = "", *, on_pairs: bool = False) -> Format:
    """The format of the corpus `path`. If `on_pairs`, preferences are tried before conversations."""
    first = first_record(path, split)
    if isinstance(first.get("text"), str):
        return "text"
    pair, chat = is_pair(first), chat_form(first) is not None
    if pair and (on_pairs or not chat):
        return "pairs"
    return "chat" if chat else "text"


def with_formats(data: Any, *, on_pairs: bool = False) -> Any:
    """The section `data` of a run's table, with formats found for the sources that name none."""
    if not isinstance(data, Mapping) or "format" in data:
        return data
    made, split = dict(data), data.get("split", "")
    if isinstance(data.get("path"), str) and (found := _of_source(data, split, on_pairs)) != "text":
        made["format"] = found
    if isinstance(data.get("mixture"), list):
        made["mixture"] = [
            _with_format(each, split, data.get("column"), "text") if isinstance(each, Mapping) else each
            for each in data["mixture"]
        ]
    if isinstance(data.get("eval"), Mapping):
        # Sources without a format have that of the section.
        kept = made.get("format", "text")
        made["eval"] = {
            name: _with_format(each, split, data.get("column"), kept) for name, each in data["eval"].items()
        }
    return made


def record_words(path: str | Path, split: str, chosen: Format) -> str:
    """How conversations or preferences are read, by the first record, or what texts leave out; "" for other texts."""
    if chosen == "pairs":
        return "preferences: 'chosen' and 'rejected'"
    first = first_record(path, split)
    form = chat_form(first)
    if chosen == "chat":
        return "" if form is None else f"conversations: {form.words()}"
    # A text beside a conversation is most often the conversation in somebody's template.
    if form in (None, SPELLED) or not isinstance(first.get("text"), str):
        return ""
    return f"text, by its key 'text'; with data.format = \"chat\" as conversations: {form.words()}"


def first_record(path: str | Path, split: str = "") -> Mapping[str, Any]:
    """The first record of a corpus, without nulls; empty if there is none, or it cannot be read."""
    if str(path) == STDLIB:
        return {}
    try:
        file = find_data(path, split).files[0]
        if not file.holds_records or (file.form == "lines" and _is_long(file.path)):
            return {}
        columns = tuple(dict.fromkeys(("text", *CHAT_COLUMNS, *PAIR_COLUMNS)))
        return next(records(file, columns, ""), ({}, ""))[0]
    # The reader of the data reports what is wrong.
    except (DataError, OSError):
        return {}


def _is_long(path: Path) -> bool:
    with path.open("rb") as stream:
        return len(stream.readline(_MOST_BYTES)) == _MOST_BYTES


def _of_source(source: Mapping[str, Any], split: Any, on_pairs: bool) -> Format:
    # A column named by the user holds text.
    if source.get("column", "text") != "text" or not isinstance(source.get("path"), str) or not source["path"]:
        return "text"
    return found_format(source["path"], split if isinstance(split, str) else "", on_pairs=on_pairs)


def _with_format(source: Any, split: Any, column: Any, general: str) -> Any:
    """A source, a path or a table, with its format added unless it names one, or the format is `general`."""
    table = {"path": source} if isinstance(source, str) else source
    if not isinstance(table, Mapping) or "format" in table:
        return source
    found = _of_source({"column": column or "text", **table}, table.get("split", split), False)
    return source if found == general else {**table, "format": found}
