"""Preferences tokenised once: pairs of responses to one prompt, the preferred before the rejected one.

A record is `{"prompt": text, "chosen": text, "rejected": text}`, or has lists of messages in place of the texts; a
list may hold the whole conversation, and `prompt` is then left out. Other keys are ignored. Each record becomes two
documents of a chat corpus (terrace.data.chat_tokens), 2 k and 2 k + 1, whose masks have the response alone: in a
conversation, the assistant's last message.
"""

import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from terrace.base.errors import DataError
from terrace.data.chat import ChatReader, Mask
from terrace.data.chat_encoder import Ids
from terrace.data.chat_tokens import Tokenized, lines_of, record_files
from terrace.data.files import JSON_LINES_SUFFIXES
from terrace.data.pieces import json_object, kind_of
from terrace.data.rendering import TemplateRefusalError
from terrace.data.tables import table_records
from terrace.data.template import load_template
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

MEMBERS = ("chosen", "rejected")
_FORMAT = "terrace-pairs-3"  # part of the key: raise it when the same data would give other bytes
_FORM = '{"prompt": ..., "chosen": ..., "rejected": ...}'


def prepare_pairs(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    cache_dir: str | Path,
    split: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> TokenFile:
    """The token file of the pairs in `path`, a `.jsonl`, `.parquet` or `.arrow` file or a folder of them; made if it is
    not in the cache. `split` chooses a split of a data set; `progress` receives a line on what is left out.

    Texts need no template. Raises `DataError`, naming file and record, for one that is no pair, else as
    `terrace.data.chat_tokens.prepare_chat`.
    """
    files = record_files(path, split, "pairs")
    needed = any(isinstance(record.get(MEMBERS[0]), list) for record, _ in _records(files))
    template = load_template(tokenizer_path, template_path, needed=needed)
    encoder = Tokenized(tokenizer, tokenizer_path, template, cache_dir, progress)
    return encoder.prepare(
        path, "pairs", _FORMAT, lambda: record_files(path, split, "pairs"), lambda reader: _responses(files, reader)
    )


def _responses(files: list[Path], reader: ChatReader) -> Iterator[tuple[Ids, Mask, str]]:
    asked: deque[dict[str, Any]] = deque()  # the reader looks some lines ahead

    def lines() -> Iterator[tuple[str, str]]:
        for record, place in _records(files):
            for member, where in _members(record, place):
                asked.append(member)
                yield json.dumps(member), where

    for ids, mask, where in reader.read(lines()):
        # Of a conversation the assistant's earlier turns are in the prompt.
        starts = np.flatnonzero(np.diff(mask, prepend=0) == 1)
        num_earlier = _num_earlier(asked.popleft(), reader, where)
        if len(starts) <= num_earlier:
            raise DataError(
                f"{where}: {reader.template.name} renders nothing of the last message that can be told from the "
                "assistant's earlier ones; repair or drop the record"
            )
        first = starts[num_earlier]
        last = np.zeros_like(mask)
        last[first:] = mask[first:]
        if not first:
            raise DataError(f"{where}: the response begins the text, so no token comes before it; give a prompt")
        yield ids, last, where


def _num_earlier(member: Mapping[str, Any], reader: ChatReader, where: str) -> int:
    # Stretches of text that the assistant says before its last message.
    *earlier, _ = member.get("messages", [None])
    num_turns = len([message for message in earlier if message["role"] == "assistant"])
    if not num_turns or not reader.template.of(member.get("tools")).has_tags:
        return num_turns  # told by prefixes, every turn has text
    # Tags may mark nothing of a turn, or several parts of it.
    try:
        _, spans = reader.template.render(earlier, member.get("tools"), add_generation_prompt=True)
    except TemplateRefusalError as error:
        raise DataError(f"{where}: {error}") from error
    parts = [(first, end) for first, end in spans or () if first < end]
    ends = [-1, *(end for _, end in parts)]
    return sum(first > before for (first, _), before in zip(parts, ends, strict=False))


def _members(record: Mapping[str, Any], where: str) -> list[tuple[dict[str, Any], str]]:
    """The two members of a pair, each as a record of chat data and its place."""
    missing = [key for key in MEMBERS if key not in record]
    if missing:
        keys = ", ".join(map(repr, list(record)[:8])) or "none"
        raise DataError(f"{where} has no key {missing[0]!r} (keys: {keys}); a pair is {_FORM}")
    found = [(_member(record, key, f"{where}: {key!r}"), f"{where}: {key!r}") for key in MEMBERS]
    if found[0][0] == found[1][0]:
        raise DataError(f"{where}: 'chosen' and 'rejected' are equal, so nothing is preferred; drop the record")
    return found


def _member(record: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    prompt, member = record.get("prompt"), record[key]
    if isinstance(member, str) and isinstance(prompt, str):
        if not member:
            raise DataError(f"{where} is empty; drop the record")
        return {"prompt": prompt, "completion": member}
    if not isinstance(member, list) or not isinstance(prompt, list | None):
        raise DataError(
            f"{where} is {kind_of(member)} and 'prompt' {'absent' if prompt is None else kind_of(prompt)}: "
            f"write {_FORM} as texts, or as lists of messages"
        )
    last = member[-1] if member else None
    if not isinstance(last, Mapping) or last.get("role") != "assistant":
        raise DataError(f"{where} does not end with a message of the assistant; repair or drop the record")
    if not last.get("content") and not last.get("tool_calls"):
        raise DataError(f"{where} ends with an empty message of the assistant; repair or drop the record")
    tools = {} if record.get("tools") is None else {"tools": record["tools"]}
    made = {"messages": [_plain(message) for message in (*(prompt or ()), *member)], **tools}
    try:
        # Tables have values without a form in JSON, such as times and bytes.
        json.dumps(made)
    except TypeError as error:
        raise DataError(f"{where}: {error}; write the value as a string") from error
    return made


def _plain(message: Any) -> Any:
    # A key with null in one member makes no difference between them.
    return {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else message


def _records(files: list[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    for file in files:
        if file.suffix.lower() in JSON_LINES_SUFFIXES:
            for line, where in lines_of([file]):
                yield json_object(line, lambda place=where: place, _FORM), where  # type: ignore[misc]
        else:
            yield from table_records(file, ("prompt", *MEMBERS, "tools"))
