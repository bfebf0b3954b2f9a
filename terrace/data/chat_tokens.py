"""Chat data tokenised once: the files of a text corpus (terrace.data.tokens) plus a mask.

Each conversation is a document. The cache key is a hash of the tokenizer, the chat template, the csv separators, and
the path, size and modification time of every source file (terrace.data.originals).
"""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from terrace.base.errors import DataError
from terrace.base.files import open_atomic
from terrace.data.cache import CorpusDescription, cache_file, file_stem, id_dtype, made_once, token_file
from terrace.data.chat import ChatReader, Mask
from terrace.data.chat_encoder import Ids, load_encoder
from terrace.data.files import find_data, find_documents, separators
from terrace.data.forms import DataFile
from terrace.data.originals import Originals
from terrace.data.records import records
from terrace.data.row_forms import CHAT_COLUMNS, chat_row, checked_json
from terrace.data.sources import STDLIB
from terrace.data.template import ChatTemplate, load_template
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

_FORMAT = "terrace-chat-3"  # part of the key: raise it when the same data would give other bytes


def prepare_chat(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    cache_dir: str | Path,
    split: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> TokenFile:
    """The token file of the conversations in `path`, a file or a folder of records; made if not cached.

    `split` chooses a split of a folder; `progress` receives a line on what is left out. Prompts with completions need
    no template. Raises `DataError`, naming file and record, for a record that is not a conversation, has nothing to
    train on or is refused by the template; also for a missing template, a damaged cache, and a folder that cannot be
    written. An error leaves no file behind.
    """
    files = record_files(path, split, "chat")
    needed = _needs_template(files)
    # Loaded before the cache is looked up, because its fingerprint is part of the key.
    template = load_template(tokenizer_path, template_path, needed=needed)
    encoder = Tokenized(tokenizer, tokenizer_path, template, cache_dir, progress)
    return encoder.prepare(path, split, "chat", _FORMAT, files, lambda reader: reader.read(_chats(files)))


@dataclass(frozen=True)
class Tokenized:
    tokenizer: Tokenizer
    tokenizer_path: str | Path
    template: ChatTemplate
    cache_dir: str | Path
    progress: Callable[[str], None] = lambda text: None

    def prepare(
        self,
        path: str | Path,
        split: str,
        kind: Literal["chat", "pairs"],
        version: str,
        files: Sequence[DataFile],
        read: Callable[[ChatReader], Iterable[tuple[Ids, Mask, str]]],
    ) -> TokenFile:
        """The token file of the conversations that `read` yields from `files`, those of `split` in `path`; made if not
        cached.

        `kind` and `version` identify the format of the content. Raises `DataError` as `prepare_chat` does.
        """
        tokenizer = self.tokenizer
        originals, dtype = Originals(path, lambda: find_documents(path, split)), id_dtype(tokenizer.vocab_size)
        identity = (version, tokenizer.fingerprint, self.template.fingerprint, separators(files), originals.identity())
        target = cache_file(self.cache_dir, file_stem(path, kind), identity)

        def make(written: dict[str, int]) -> CorpusDescription:
            reader = ChatReader(self.template, load_encoder(self.tokenizer_path, tokenizer))
            facts = _write(target, _checked(read(reader), tokenizer.vocab_size, path), dtype)
            return CorpusDescription(
                format=version,
                corpus=os.fspath(path),
                tokenizer=tokenizer.fingerprint,
                template=self.template.fingerprint,
                dtype=dtype,
                left_out=reader.left_out.line(path),
                **facts,
            )

        left_out = ""

        def opened(description: CorpusDescription) -> TokenFile:
            nonlocal left_out
            left_out = description.left_out
            return token_file(target, description, target.with_suffix(".mask"))

        found = made_once(target, (".tokens", ".mask", ".starts"), CorpusDescription, make, opened, originals)
        # Reported for a cached file, too: every run trains on it.
        if left_out:
            self.progress(left_out)
        return found


def read_chats(
    path: str | Path,
    tokenizer: Tokenizer,
    tokenizer_path: str | Path,
    template_path: str | Path,
    split: str = "",
    progress: Callable[[str], None] = lambda text: None,
) -> Iterator[tuple[Ids, Mask, str]]:
    """Yields ids, mask and place of each conversation in `path`, without a cache. Raises as `prepare_chat` does.

    At the end `progress` receives a line on what was left out of the conversations read.
    """
    files = record_files(path, split, "chat")
    template = load_template(tokenizer_path, template_path, needed=_needs_template(files))
    reader = ChatReader(template, load_encoder(tokenizer_path, tokenizer))
    try:
        yield from reader.read(_chats(files))
    finally:  # also if the caller stops early
        if line := reader.left_out.line(path):
            progress(line)


def holds_conversations(path: str | Path, split: str = "") -> bool:
    """Whether the first record of chat data is a conversation, not a prompt with its completion."""
    first, _ = next(_chats(record_files(path, split, "chat")), ({}, ""))
    return "messages" in first


def _write(target: Path, conversations: Iterable[tuple[Ids, Mask]], dtype: str) -> dict[str, Any]:
    stored = np.dtype(dtype).newbyteorder("<")
    digest = hashlib.blake2b(digest_size=16)
    starts: list[int] = []
    num_tokens = num_trained = 0
    max_token = -1
    with ExitStack() as made:
        tokens_file, mask_file, starts_file = (
            made.enter_context(open_atomic(target.with_suffix(suffix))) for suffix in (".tokens", ".mask", ".starts")
        )
        for ids, mask in conversations:
            raw, raw_mask = ids.astype(stored).tobytes(), mask.tobytes()
            tokens_file.write(raw)
            mask_file.write(raw_mask)
            # With its length, so that document borders are part of the digest.
            digest.update(len(raw).to_bytes(8, "little") + raw + raw_mask)
            starts.append(num_tokens)
            num_tokens += len(ids)
            num_trained += int(mask.sum())
            max_token = max(max_token, int(ids.max()))
        starts_file.write(np.array(starts, dtype="<i8").tobytes())
    return {
        "num_tokens": num_tokens,
        "max_token": max_token,
        "digest": digest.hexdigest(),
        "num_documents": len(starts),
        "num_trained": num_trained,
    }


def _checked(
    conversations: Iterable[tuple[Ids, Mask, str]], vocab_size: int, path: str | Path
) -> Iterator[tuple[Ids, Mask]]:
    any_there = False
    for ids, mask, where in conversations:
        if int(ids.max()) >= vocab_size:
            raise DataError(
                f"{where}: the tokenizer gave id {ids.max()}, outside its vocabulary of {vocab_size}; use a tokenizer "
                "whose files belong together"
            )
        any_there = True
        yield ids, mask
    if not any_there:
        raise DataError(f"data {path} holds no conversation and no pair; give it one")


def _chats(files: Iterable[DataFile]) -> Iterator[tuple[dict[str, Any], str]]:
    return rows_of(files, CHAT_COLUMNS, chat_row)


def _needs_template(files: Iterable[DataFile]) -> bool:
    # Completions are plain text; the first row that is none decides.
    return any("messages" in row for row, _ in _chats(files))


def rows_of(
    files: Iterable[DataFile], columns: tuple[str, ...], made: Callable[[Mapping[str, Any], str], dict[str, Any]]
) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields each record of `files`, converted by `made`, with its place. Of tables only `columns` are read."""
    for file in files:
        for record, where in records(file, columns, "with the keys of a known form"):
            yield checked_json(made(record, where), where), where


def record_files(path: str | Path, split: str, form: Literal["chat", "pairs"]) -> tuple[DataFile, ...]:
    """The files of records at `path`. Raises `DataError` for files that cannot hold `data.format = form`."""
    needed = {"chat": "conversations", "pairs": "pairs"}[form]
    if path == STDLIB:
        raise DataError(
            f'data.format = "{form}" needs {needed}, and data.path = {STDLIB!r} is source text: name a .jsonl file '
            "with --data"
        )
    files = find_data(path, split).files
    for file in files:
        if not file.holds_records:
            raise DataError(
                f"data {file.path} is text, and {needed} are records: write them as .jsonl, .json, .csv, .parquet or "
                ".arrow, or move the file elsewhere"
            )
    return files
