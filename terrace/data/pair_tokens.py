"""Preferences tokenised once: pairs of responses to one prompt, the preferred before the rejected one.

A record is a preference of any form (terrace.data.row_forms). Each becomes documents 2 k and 2 k + 1 of a chat corpus
(terrace.data.chat_tokens), whose masks cover only the response: in a conversation, the assistant's text after the
common prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from terrace.base.errors import DataError
from terrace.data.chat import ChatReader, Mask
from terrace.data.chat_encoder import Ids
from terrace.data.chat_tokens import Tokenized, record_files, rows_of
from terrace.data.forms import DataFile
from terrace.data.row_forms import FOR_TEMPLATE, MEMBERS, NUM_ASKED, PAIR_COLUMNS, pair_row
from terrace.data.template import load_template
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

_FORMAT = "terrace-pairs-3"  # part of the key: raise it when the same data would give other bytes


def prepare_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    cache_dir: str | Path,
    split: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> TokenFile:
    """The token file of the pairs in `path`, a file or a folder of records; made if not cached.

    `split` chooses a split of a folder; `progress` receives a line on what is left out. Plain texts need no template.
    Raises `DataError`, naming file and record, for a record that is not a pair, and otherwise as
    `terrace.data.chat_tokens.prepare_chat`.
    """
    files = record_files(path, split, "pairs")
    needed = any(isinstance(row["chosen"], list) for row, _ in _rows(files))
    template = load_template(tokenizer_path, template_path, needed=needed)
    encoder = Tokenized(tokenizer, tokenizer_path, template, cache_dir, progress)
    return encoder.prepare(path, split, "pairs", _FORMAT, files, lambda reader: _responses(files, reader))


def _responses(files: Iterable[DataFile], reader: ChatReader) -> Iterator[tuple[Ids, Mask, str]]:
    for ids, mask, where in reader.read(member for row, place in _rows(files) for member in _members(row, place)):
        if not int(mask.argmax()):
            raise DataError(f"{where}: the response begins the text, so no token comes before it; give a prompt")
        yield ids, mask, where


def _rows(files: Iterable[DataFile]) -> Iterator[tuple[dict[str, Any], str]]:
    return rows_of(files, PAIR_COLUMNS, pair_row)


def _members(row: Mapping[str, Any], where: str) -> list[tuple[dict[str, Any], str]]:
    if row["chosen"] == row["rejected"]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are equal, so nothing is preferred; drop the record")
    return [(_member(row, key), f"{where}: {key!r}") for key in MEMBERS]


def _member(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    prompt, member = row["prompt"], row[key]
    if isinstance(member, str):
        return {"prompt": prompt, "completion": member}
    more = {key: row[key] for key in FOR_TEMPLATE if key in row}
    return {"messages": [*prompt, *member], NUM_ASKED: len(prompt), **more}
