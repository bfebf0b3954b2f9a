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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import sync_folder, write_atomic
from terrace.base.schema import load, read_table
from terrace.train.data.corpus import Piece, find_documents, read_pieces
from terrace.train.data.tokenizer import Tokenizer

_FORMAT = "terrace-tokens-2"  # part of the key: raise it when the same corpus would give other bytes

Tokens = npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A prepared corpus. `digest` is a hash of what it holds, equal on every machine that has the same data."""

    path: Path
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    max_token: int
    digest: str
    num_documents: int  # those with at least one token
    starts: Path
    mask: Path | None  # None: every token is trained on

    def open(self) -> "np.memmap[tuple[int], np.dtype[np.unsignedinteger]]":
        """Map the ids read-only, shape (num_tokens,), dtype `dtype`.

        Raises `DataError` when the file is missing, unreadable or not of the size it should have.
        """
        return _map(self.path, np.dtype(self.dtype), self.num_tokens, f"tokens of {self.dtype}")

    def open_starts(self) -> "np.memmap[tuple[int], np.dtype[np.int64]]":
        """Map the places where documents begin read-only, int64 of shape (num_documents,), rising from 0.

        Raises `DataError` as `open` does.
        """
        return _map(self.starts, np.dtype(np.int64), self.num_documents, "starts of documents")

    def open_mask(self) -> "np.memmap[tuple[int], np.dtype[np.uint8]] | None":
        """Map the mask read-only, uint8 of shape (num_tokens,), 1: is trained on; `None`: every token is.

        Raises `DataError` as `open` does.
        """
        if self.mask is None:
            return None
        return _map(self.mask, np.dtype(np.uint8), self.num_tokens, "tokens of a mask")

    def check_vocab(self, vocab_size: int) -> None:
        """Raise `DataError` when an id of this file has no row in a vocabulary of `vocab_size`."""
        if self.max_token >= vocab_size:
            raise DataError(
                f"{self.path} holds token id {self.max_token}, but the model's vocab_size is {vocab_size}; "
                f"give the model a vocab_size of at least {self.max_token + 1} or use its own tokenizer"
            )


def _map(path: Path, dtype: np.dtype[Any], count: int, what: str) -> "np.memmap[tuple[int], np.dtype[Any]]":
    dtype = dtype.newbyteorder("<")
    expected = count * dtype.itemsize
    try:
        size = path.stat().st_size
        if size != expected or expected == 0:
            raise DataError(
                f"{path} is damaged: it has {size} bytes, but {count} {what} take {expected}; delete it, and it "
                "will be made again"
            )
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}; prepare the data again") from error


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


def prepare_tokens(path: str | Path, tokenizer: Tokenizer, cache_dir: str | Path) -> TokenFile:
    """Return the token file of the corpus `path`, made in `cache_dir` unless it is there already.

    Raises `DataError` for a corpus that cannot be read (see `corpus`), one that changes meanwhile, a
    damaged cache, and a folder that cannot be written; an error leaves no file behind.
    """
    source = _source_fingerprint(path)
    identity = (_FORMAT, tokenizer.fingerprint, tokenizer.vocab_size, tokenizer.end_of_text, source)
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
            _make(made, target, path, tokenizer, tally)
            if _source_fingerprint(path) != source:
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
        self.max_token = -1
        self.digest = hashlib.blake2b(digest_size=16)
        self.starts: list[int] = []
        self.masked: list[tuple[int, int]] = []  # first token, one past the last

    def name(self) -> str:
        if self.masked:
            self.digest.update(json.dumps(self.masked).encode())
        return self.digest.hexdigest()


def _make(made: dict[Path, str], target: Path, path: str | Path, tokenizer: Tokenizer, tally: _Tally) -> None:
    with _temporary(made, target) as file:
        _write_tokens(file, read_pieces(path), tokenizer, tally)
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


def _write_tokens(file: IO[bytes], pieces: Iterable[Piece], tokenizer: Tokenizer, tally: _Tally) -> None:
    stored = np.dtype(tally.dtype).newbyteorder("<")
    end = np.array([] if tokenizer.end_of_text is None else [tokenizer.end_of_text], dtype=np.int64)
    begins = True
    for piece in pieces:
        ids = tokenizer.encode(piece.text)
        if piece.ends_document:
            ids = np.concatenate([ids, end])
        if ids.size:
            largest, smallest = int(ids.max()), int(ids.min())
            if smallest < 0 or largest >= tokenizer.vocab_size:
                raise DataError(
                    f"the tokenizer gave ids from {smallest} to {largest}, outside its vocabulary of "
                    f"{tokenizer.vocab_size}; use a tokenizer whose files belong together"
                )
            raw = ids.astype(stored).tobytes()
            file.write(raw)
            tally.starts += [tally.num_tokens] * begins
            tally.masked += [(tally.num_tokens, tally.num_tokens + ids.size)] * (not piece.trains)
            tally.num_tokens += ids.size
            tally.num_bytes += len(raw)
            tally.max_token = max(tally.max_token, largest)
            tally.digest.update(raw)
        begins = piece.ends_document or (begins and not ids.size)
    if tally.num_tokens == 0:
        raise DataError("the tokenizer turned all of the text into no tokens; use another tokenizer")


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


def _source_fingerprint(path: str | Path) -> str:
    """Hash the full path, size and modification time of every file of the corpus."""
    digest = hashlib.sha256()
    for file in find_documents(path):
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
