"""A corpus tokenised once, into a file that is mapped into memory.

`<name>-<key>.tokens` holds little-endian uint16 or uint32 ids, each document followed by the tokenizer's
end of text. Beside it, `.starts` holds where each document begins (little-endian int64, in tokens, rising
from 0), and `.json` describes them. The key is a hash of the tokenizer and of the path, size and modification time of
every source file, so another source or tokenizer is another file and one that somebody has mapped never changes. Old
ones are not removed: nobody here knows who still reads them. They may be deleted by hand at any time no run uses them.

While it is made it has other names (terrace.data.partial), and the description comes last: a description means a
complete cache.
"""

import errno
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import sync_folder, write_atomic
from terrace.base.schema import load, read_table
from terrace.data.corpus import corpus_units, read_unit
from terrace.data.files import find_documents
from terrace.data.indexed import is_indexed, open_indexed
from terrace.data.partial import Noted, Partial, alone
from terrace.data.pieces import Piece, Unit
from terrace.data.token_file import TokenFile
from terrace.data.tokenizer import Tokenizer

_FORMAT = "terrace-tokens-3"  # part of the key: raise it when the same corpus would give other bytes

_TELL_S = 1.0
_NOTE_BYTES = 16 << 20  # of a corpus, between two notes of how far it is
_BATCH_CHARACTERS, _BATCH_PIECES = 1 << 21, 1 << 14  # a tokenizer needs some hundred bytes a character

Progress = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class _Description:
    """The `.json` beside a token file; `corpus` is there for people."""

    format: str
    corpus: str
    tokenizer: str
    source: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    max_token: int
    digest: str
    num_documents: int


def prepare_tokens(
    path: str | Path,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    column: str = "text",
    split: str = "",
    progress: Progress = lambda text: None,
) -> TokenFile:
    """Return the token file of the corpus `path`, made in `cache_dir` unless it is there already.

    `progress` is told in words how far it is, about once a second. What another process makes is waited for, and what a
    process that was killed has left is gone on with. Raises `DataError` for a corpus that cannot be read (see
    `corpus`), one that changes meanwhile, a damaged cache, and a folder that cannot be written; an error leaves no
    file behind.
    """
    if is_indexed(path):
        for key, value, plain in (("column", column, "text"), ("split", split, "")):
            if value != plain:
                raise DataError(f"data.{key} = {value!r} has no effect on the indexed data set {path}: leave it out")
        return open_indexed(path, cache_dir)
    source = _source_fingerprint(path, split)
    identity = (_FORMAT, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text, column, source)
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem)[:40].strip("-") or "corpus"
    target = Path(cache_dir) / f"{name}-{key}.tokens"
    ready = _load_ready(target)
    if ready is not None:
        return ready
    num_bytes = 0
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with alone(target):
            ready = _load_ready(target)
            if ready is not None:
                return ready
            partial = Partial(target)
            try:
                _write_tokens(partial, corpus_units(path, column, split), tokenizer, progress)
                if _source_fingerprint(path, split) != source:
                    raise DataError(f"data {path} changed while it was read; try again when nothing writes to it")
                _check_text(partial.noted, path)
                partial.finish()
            except Exception:
                num_bytes = partial.noted.num_bytes
                partial.remove()
                raise
            except BaseException:  # killed or interrupted: the next one goes on
                partial.close()
                raise
            description = _Description(
                format=_FORMAT,
                corpus=os.fspath(path),
                tokenizer=tokenizer.fingerprint,
                source=source,
                dtype=_stored(tokenizer),
                num_tokens=partial.noted.num_tokens,
                max_token=partial.noted.max_token,
                digest=_digest(partial, tokenizer),
                num_documents=partial.noted.num_documents,
            )
            _describe(target, description)
    except OSError as error:
        raise _unwritable(target, num_bytes, error) from error
    return _token_file(target, description)


def _write_tokens(partial: Partial, units: Iterable[Unit], tokenizer: Tokenizer, progress: Progress) -> None:
    """Append the ids of all units but those that are done, noting from time to time how far it is."""
    noted = partial.noted
    stored = np.dtype(_stored(tokenizer)).newbyteorder("<")
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int64)
    began, first = time.monotonic(), noted.num_tokens
    told = began
    if first:
        progress(f"going on after {first / 1e6:.1f} M tokens that are there")
    for num_done, group in _groups(units, noted.num_units):
        for piece, ids in _encoded(chain.from_iterable(map(read_unit, group)), tokenizer, noted):
            whole = np.concatenate([ids, end]) if piece.ends_document else ids
            if whole.size and not 0 <= int(whole.min()) <= int(whole.max()) < tokenizer.vocab_size:
                raise DataError(
                    f"the tokenizer gave ids from {whole.min()} to {whole.max()}, outside its vocabulary of "
                    f"{tokenizer.vocab_size}; use a tokenizer whose files belong together"
                )
            partial.add(whole, whole.astype(stored).tobytes(), piece.ends_document)
            now = time.monotonic()
            if now - told > _TELL_S:
                told = now
                rate = (noted.num_tokens - first) / (now - began)
                progress(f"tokenising: {noted.num_tokens / 1e6:.1f} M tokens, {rate:,.0f} a second")
        if sum(unit.num_bytes for unit in group) >= _NOTE_BYTES:
            partial.note(num_done)
    if noted.num_empty:
        progress(f"{noted.num_empty} empty documents were left out")


def _check_text(noted: Noted, path: str | Path) -> None:
    if not noted.has_text:
        raise DataError(f"data {path} holds no text, only white space or empty documents; give it some text")
    if noted.num_tokens == 0:
        raise DataError("the tokenizer turned all of the text into no tokens; use another tokenizer")


def _groups(units: Iterable[Unit], num_done: int) -> Iterator[tuple[int, list[Unit]]]:
    """Yield units of some megabytes together, after the first `num_done`, with how many are done after them."""
    held: list[Unit] = []
    for number, unit in enumerate(units, start=1):
        if number <= num_done:
            continue
        held.append(unit)
        if sum(each.num_bytes for each in held) >= _NOTE_BYTES:
            yield number, held
            held = []
    if held:
        yield number, held


def _encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, noted: Noted
) -> Iterator[tuple[Piece, npt.NDArray[np.int64]]]:
    """Yield pieces with their ids; the next batch is encoded while the caller works on this one."""
    with ThreadPoolExecutor(1) as ahead:
        waiting: deque[tuple[list[Piece], Future[list[npt.NDArray[np.int64]]]]] = deque()
        for batch in _batched(pieces, noted):
            waiting.append((batch, ahead.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
            if len(waiting) > 1:
                done, ids = waiting.popleft()
                yield from zip(done, ids.result(), strict=True)
        for done, ids in waiting:
            yield from zip(done, ids.result(), strict=True)


def _batched(pieces: Iterable[Piece], noted: Noted) -> Iterator[list[Piece]]:
    """Yield the pieces in lists of some million characters, without documents that are empty."""
    held: list[Piece] = []
    size, begins = 0, noted.begins
    for piece in pieces:
        is_empty = begins and piece.ends_document and not piece.text
        begins = piece.ends_document
        if is_empty:
            noted.num_empty += 1
            continue
        noted.has_text = noted.has_text or not piece.text.isspace()
        held.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(held) >= _BATCH_PIECES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _stored(tokenizer: Tokenizer) -> Literal["uint16", "uint32"]:
    return "uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32"


def _digest(partial: Partial, tokenizer: Tokenizer) -> str:
    """Return the digest of the ids and, where no id ends a document, of where documents begin."""
    if tokenizer.end_of_text is None:
        partial.digest.update(partial.target.with_suffix(".starts").read_bytes())
    return partial.digest.hexdigest()


def _describe(target: Path, description: _Description) -> None:
    try:
        write_atomic(target.with_suffix(".json"), json.dumps(asdict(description), indent=2) + "\n")
        sync_folder(target.parent)
    except BaseException:
        if not target.with_suffix(".json").exists():
            for suffix in (".tokens", ".starts"):
                target.with_suffix(suffix).unlink(missing_ok=True)
        raise


def _load_ready(target: Path) -> TokenFile | None:
    """Return the token file that `target` and its description make up, `None` when one is missing."""
    described = target.with_suffix(".json")
    try:
        described.stat()
        target.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unwritable(target, 0, error) from error
    try:
        description = load(_Description, read_table(described), "tokens")
    except ConfigError as error:
        raise DataError(f"{described} is damaged ({error}); delete it, and it will be made again") from error
    ready = _token_file(target, description)
    if not ready.starts.exists():
        return None
    for check in (ready.open, ready.open_starts):
        check()  # the size
    return ready


def _token_file(target: Path, description: _Description) -> TokenFile:
    return TokenFile(
        path=target,
        dtype=description.dtype,
        num_tokens=description.num_tokens,
        max_token=description.max_token,
        digest=description.digest,
        num_documents=description.num_documents,
        starts=target.with_suffix(".starts"),
        mask=None,
    )


def _source_fingerprint(path: str | Path, split: str) -> str:
    """Hash the full path, size and modification time of every file of the corpus."""
    digest = hashlib.sha256()
    for file in find_documents(path, split):
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"cannot read data {file}: {error.strerror}; keep it in place") from error
        digest.update(os.fsencode(file.resolve()))
        digest.update(f"\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _unwritable(target: Path, num_bytes: int, error: OSError) -> DataError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        fix = f"stopped after {num_bytes} bytes; free some space or choose another cache folder"
    else:
        fix = "choose a cache folder that you may write to"
    return DataError(f"cannot write the token file {target}: {error.strerror}; {fix}")
