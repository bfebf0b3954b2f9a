"""Preferences tokenised once: pairs of responses to one prompt, the preferred before the rejected one.

A record is `{"prompt": text, "chosen": text, "rejected": text}`, or has lists of messages in place of the texts; a
list may hold the whole conversation, and `prompt` is then left out. Other keys are ignored. Each record becomes two
documents of a chat corpus (terrace.data.chat_tokens), 2 k and 2 k + 1, whose masks have the response alone: of a
conversation what the assistant says last.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from terrace.base.errors import DataError
from terrace.data.chat import ChatReader, Ids, Mask
from terrace.data.chat_tokens import Tokenized, lines_of
from terrace.data.files import JSON_LINES_SUFFIXES, find_documents
from terrace.data.pieces import json_object, kind_of
from terrace.data.sources import STDLIB
from terrace.data.tables import PARQUET, parquet_records
from terrace.data.template import load_template
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

MEMBERS = ("chosen", "rejected")
_FORMAT = "terrace-pairs-1"  # part of the key: raise it when the same data would give other bytes
_FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}'


def prepare_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    cache_dir: str | Path,
) -> TokenFile:
    """The token file of the pairs in `path`, a `.jsonl` or `.parquet` file or a folder of them; made if it is not in
    the cache.

    Texts need no template. Raises `DataError`, naming file and record, for one that is no pair, else as
    `terrace.data.chat_tokens.prepare_chat`.
    """
    files = _files(path)
    needed = any(isinstance(record.get(MEMBERS[0]), list) for record, _ in _records(files))
    template = load_template(tokenizer_path, template_path, needed=needed)
    encoder = Tokenized(tokenizer, tokenizer_path, template, cache_dir)
    return encoder.prepare(path, "pairs", _FORMAT, lambda: _files(path), lambda reader: _responses(files, reader))


def _responses(files: list[Path], reader: ChatReader) -> Iterator[tuple[Ids, Mask, str]]:
    lines = ((line, where) for record, place in _records(files) for line, where in _conversations(record, place))
    for ids, mask, where in reader.read(lines):
        # Of a conversation the assistant's earlier turns are in the prompt.
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        last = np.zeros_like(mask)
        last[starts[-1] :] = mask[starts[-1] :]
        if not starts[-1]:
            raise DataError(f"{where}: the response begins the text, so no token comes before it; give a prompt")
        yield ids, last, where


def _conversations(record: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    """The two members of a pair, each as a line of chat data and its place."""
    missing = [key for key in MEMBERS if key not in record]
    if missing:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"{where} has no key {missing[0]!r} (keys: {keys}); a pair is {_FORM}")
    prompt, members = record.get("prompt"), [record[key] for key in MEMBERS]
    if members[0] == members[1]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are equal, so nothing is preferred; drop the record")
    for key, member in zip(MEMBERS, members, strict=True):
        here = f"{where}: {key!r}"
        if isinstance(member, str) and isinstance(prompt, str):
            if not member:
                raise DataError(f"{here} is empty; drop the record")
            yield json.dumps({"prompt": prompt, "completion": member}), here
        elif isinstance(member, list) and isinstance(prompt, list | None):
            if not member or not isinstance(member[-1], Mapping) or member[-1].get("role") != "assistant":
                raise DataError(f"{here} does not end with a message of the assistant; repair or drop the record")
            messages = [_plain(message) for message in (*(prompt or ()), *member)]
            tools = {} if record.get("tools") is None else {"tools": record["tools"]}
            yield json.dumps({"messages": messages, **tools}), here
        else:
            raise DataError(
                f"{here} is {kind_of(member)} and 'prompt' {'absent' if prompt is None else kind_of(prompt)}: "
                f"write {_FORM} as texts, or as lists of messages"
            )


def _plain(message: Any) -> Any:
    # Tables give all messages the same keys, null where one has none.
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def _records(files: list[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    for file in files:
        if file.suffix.lower() in JSON_LINES_SUFFIXES:
            for line, where in lines_of([file]):
                yield json_object(line, lambda place=where: place, _FORM), where  # type: ignore[misc]
        else:
            yield from parquet_records(file, ("prompt", *MEMBERS, "tools"))


def _files(path: str | Path) -> list[Path]:
    if path == STDLIB:
        raise DataError(
            f'data.format = "pairs" needs pairs, and data.path = {STDLIB!r} is source text: name a .jsonl file with '
            "--data"
        )
    files = find_documents(path)
    for file in files:
        if file.suffix.lower() not in {*JSON_LINES_SUFFIXES, PARQUET}:
            raise DataError(f"data {file} is no .jsonl or .parquet file, as pairs must be; convert it or move it")
    return files
