"""A corpus tokenised once, into a file that is mapped into memory.

`<name>-<key>.tokens` holds little-endian uint16 or uint32 ids, each document followed by the tokenizer's
end of text. Beside it, `.starts` holds where each document begins (little-endian int64, in tokens, rising
from 0), `.mask`, only where some pieces are not trained on, one byte a token (1: trained on), and `.json`
describes them. The key is a hash of the tokenizer and of the
path, size and modification time of every source file, so another source or tokenizer is another file and
one that somebody has mapped never changes. Old ones are not removed: nobody here knows who still reads
them. They may be deleted by hand at any time no run uses them.

All are written whole to a temporary name and renamed, the description last: a description means a complete
cache. Processes that prepare the same corpus at once write equal bytes, and the last rename
wins. It is safe but repeats the work: let one process of a machine prepare, then the others.
"""

import errno
import hashlib
import json
import os
import re
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Literal

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import sync_folder, write_atomic
from terrace.base.schema import load, read_table
from terrace.train.data.corpus import read_pieces
from terrace.train.data.files import find_documents
from terrace.train.data.indexed import is_indexed, open_indexed
from terrace.train.data.pieces import Piece
from terrace.train.data.token_file import TokenFile
from terrace.train.data.tokenizer import Tokenizer

_FORMAT = "terrace-tokens-3"  # part of the key: raise it when the same corpus would give other bytes

_TELL_S = 1.0
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
    masked: bool


def prepare_tokens(
    path: str | Path,
    tokenizer: Tokenizer,
    cache_dir: str | Path,
    column: str = "text",
    split: str = "",
    progress: Progress = lambda text: None,
) -> TokenFile:
    """Return the token file of the corpus `path`, made in `cache_dir` unless it is there already.

    `progress` is told in words how far it is, about once a second. Raises `DataError` for a corpus that cannot be read
    (see `corpus`), one that changes meanwhile, a damaged cache, and a folder that cannot be written; an error leaves no
    file behind.
    """
    if is_indexed(path):
        return open_indexed(path, cache_dir)
    source = _source_fingerprint(path, split)
    identity = (_FORMAT, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text, column, source)
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem)[:40].strip("-") or "corpus"
    target = Path(cache_dir) / f"{name}-{key}.tokens"
    ready = _load_ready(target)
    if ready is not None:
        return ready
    tally = _Tally(dtype="uint16" if tokenizer.vocab_size <= 1 << 16 else "uint32")
    made: dict[Path, str] = {}  # file -> temporary
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            pieces = read_pieces(path, column, split)
            _make(made, target, pieces, tokenizer, tally, progress)
            if _source_fingerprint(path, split) != source:
                raise DataError(f"data {path} changed while it was read; try again when nothing writes to it")
            for file, temporary in made.items():
                os.chmod(temporary, 0o644)
                os.replace(temporary, file)
        except BaseException:
            for temporary in made.values():
                Path(temporary).unlink(missing_ok=True)
            raise
        description = _Description(
            format=_FORMAT,
            corpus=os.fspath(path),
            tokenizer=tokenizer.fingerprint,
            source=source,
            dtype=tally.dtype,
            num_tokens=tally.num_tokens,
            max_token=tally.max_token,
            digest=tally.name(),
            num_documents=len(tally.starts),
            masked=target.with_suffix(".mask") in made,
        )
        _describe(target, description)
    except OSError as error:
        raise _unwritable(target, tally.num_bytes, error) from error
    return _token_file(target, description)


class _Tally:
    """What is known of the ids written so far."""

    def __init__(self, dtype: Literal["uint16", "uint32"]) -> None:
        self.dtype = dtype
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_empty = 0  # documents without text
        self.max_token = -1
        self.digest = hashlib.blake2b(digest_size=16)
        self.starts = array("q")  # 8 bytes a document, where a list takes 40
        self.masked: list[tuple[int, int]] = []  # first token, one past the last
        self.begins = True  # whether the next piece begins a document

    def add(self, piece: Piece, ids: npt.NDArray[np.int64], raw: bytes) -> None:
        """Take in a piece, its ids and these as they are stored."""
        if ids.size:
            if self.begins:
                self.starts.append(self.num_tokens)
            self.masked += [(self.num_tokens, self.num_tokens + ids.size)] * (not piece.trains)
            self.num_tokens += ids.size
            self.num_bytes += len(raw)
            self.max_token = max(self.max_token, int(ids.max()))
            self.digest.update(raw)
        self.begins = piece.ends_document or (self.begins and not ids.size)

    def name(self) -> str:
        if self.masked:
            self.digest.update(json.dumps(self.masked).encode())
        return self.digest.hexdigest()


def _make(
    made: dict[Path, str],
    target: Path,
    pieces: Iterable[Piece],
    tokenizer: Tokenizer,
    tally: _Tally,
    progress: Progress,
) -> None:
    with _temporary(made, target) as file:
        _write_tokens(file, pieces, tokenizer, tally, progress)
    with _temporary(made, target.with_suffix(".starts")) as file:
        file.write(np.array(tally.starts, dtype="<i8").tobytes())
    if tally.masked:
        mask = np.ones(tally.num_tokens, dtype=np.uint8)
        for first, end in tally.masked:
            mask[first:end] = 0
        with _temporary(made, target.with_suffix(".mask")) as file:
            file.write(mask.tobytes())


@contextmanager
def _temporary(made: dict[Path, str], target: Path) -> Iterator[IO[bytes]]:
    handle, made[target] = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    with os.fdopen(handle, "wb", buffering=1 << 20) as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _write_tokens(
    file: IO[bytes], pieces: Iterable[Piece], tokenizer: Tokenizer, tally: _Tally, progress: Progress
) -> None:
    stored = np.dtype(tally.dtype).newbyteorder("<")
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int64)
    began = told = time.monotonic()
    for piece, ids in _encoded(pieces, tokenizer, tally):
        whole = np.concatenate([ids, end]) if piece.ends_document else ids
        if whole.size and not 0 <= int(whole.min()) <= int(whole.max()) < tokenizer.vocab_size:
            raise DataError(
                f"the tokenizer gave ids from {whole.min()} to {whole.max()}, outside its vocabulary of "
                f"{tokenizer.vocab_size}; use a tokenizer whose files belong together"
            )
        raw = whole.astype(stored).tobytes()
        file.write(raw)
        tally.add(piece, whole, raw)
        now = time.monotonic()
        if now - told > _TELL_S:
            told = now
            progress(
                f"tokenising: {tally.num_tokens / 1e6:.1f} M tokens, {tally.num_tokens / (now - began):,.0f} a second"
            )
    if tally.num_empty:
        progress(f"{tally.num_empty} empty documents were left out")
    if tally.num_tokens == 0:
        raise DataError("the tokenizer turned all of the text into no tokens; use another tokenizer")


def _encoded(
    pieces: Iterable[Piece], tokenizer: Tokenizer, tally: _Tally
) -> Iterator[tuple[Piece, npt.NDArray[np.int64]]]:
    """Yield pieces with their ids; the next batch is encoded while the caller works on this one."""
    with ThreadPoolExecutor(1) as ahead:
        waiting: deque[tuple[list[Piece], Future[list[npt.NDArray[np.int64]]]]] = deque()
        for batch in _batched(pieces, tally):
            waiting.append((batch, ahead.submit(tokenizer.encode_batch, [piece.text for piece in batch])))
            if len(waiting) > 1:
                done, ids = waiting.popleft()
                yield from zip(done, ids.result(), strict=True)
        for done, ids in waiting:
            yield from zip(done, ids.result(), strict=True)


def _batched(pieces: Iterable[Piece], tally: _Tally) -> Iterator[list[Piece]]:
    """Yield the pieces in lists of some million characters, without documents that are empty."""
    held: list[Piece] = []
    size, begins = 0, True
    for piece in pieces:
        is_empty = begins and piece.ends_document and not piece.text
        begins = piece.ends_document
        if is_empty:
            tally.num_empty += 1
            continue
        held.append(piece)
        size += len(piece.text)
        if size >= _BATCH_CHARACTERS or len(held) >= _BATCH_PIECES:
            yield held
            held, size = [], 0
    if held:
        yield held


def _describe(target: Path, description: _Description) -> None:
    try:
        write_atomic(target.with_suffix(".json"), json.dumps(asdict(description), indent=2) + "\n")
        sync_folder(target.parent)
    except BaseException:
        if not target.with_suffix(".json").exists():
            for suffix in (".tokens", ".starts", ".mask"):
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
    if not ready.starts.exists() or (ready.mask is not None and not ready.mask.exists()):
        return None
    for check in (ready.open, ready.open_starts, ready.open_mask):
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
        mask=target.with_suffix(".mask") if description.masked else None,
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
