"""Cached token files: how they are named, described, found again and written.

A description, `NAME.json`, is written last: where it exists, the files beside it are complete.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import open_own, sync_folder, write_atomic
from terrace.base.schema import dump, load, read_table
from terrace.data.token_file import TokenFile


@dataclass(frozen=True, kw_only=True)
class Description:
    format: str
    max_token: int
    digest: str
    num_documents: int


@dataclass(frozen=True, kw_only=True)
class CorpusDescription(Description):
    """Description of a corpus tokenised here; `corpus` is for people."""

    corpus: str
    tokenizer: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    source: str | None = None  # of text: the fingerprint of its files
    template: str | None = None  # of chats
    num_trained: int | None = None  # tokens of chats


AnyDescription = TypeVar("AnyDescription", bound=Description)


def cache_file(cache_dir: str | Path, name: str, identity: object, suffix: str = ".tokens") -> Path:
    """Path of a cached file; its key is a hash of `identity`, so another source or tokenizer is another file."""
    # JSON gives equal identities equal bytes in every process, unlike Python's hash.
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return Path(cache_dir) / f"{name}-{key}{suffix}"


def file_stem(path: str | Path, default: str) -> str:
    """Stem of `path` with characters that are safe in a file name, at most 40 of them."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem)[:40].strip("-") or default


def made_once(
    target: Path,
    suffixes: Sequence[str],
    kind: type[AnyDescription],
    make: Callable[[dict[str, int]], AnyDescription],
) -> AnyDescription:
    """The description of the files `target` with `suffixes`; `make` makes them where one is missing.

    Waits for another process that makes them. `make` may note in its argument how many `num_bytes` it has written.
    Raises `DataError` for a damaged description, and where the folder cannot be written; an error leaves no file.
    """
    described, *files = (target.with_suffix(suffix) for suffix in (".json", *suffixes))
    with writing(target) as written:
        if not _exist(described, *files):
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(target):
                # The process that was waited for may have made them.
                if not _exist(described, *files):
                    try:
                        description = make(written)
                        write_atomic(described, json.dumps(dump(description), indent=2) + "\n")
                        # The rename itself must be on the disk before the files count as complete.
                        sync_folder(target.parent)
                        return description
                    except BaseException:
                        # Files without a description would never be used nor removed.
                        for file in files if not described.exists() else ():
                            file.unlink(missing_ok=True)
                        raise
    try:
        return load(kind, read_table(described), "tokens")
    except ConfigError as error:
        raise DataError(f"{described} is damaged ({error}); delete it, and it will be made again") from error


def _exist(*files: Path) -> bool:
    try:
        for file in files:
            file.stat()  # raises where the folder cannot be read
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Waits until no other process makes `target`, and keeps others waiting."""
    path = target.with_name(f".{target.stem}.lock")
    while True:
        with os.fdopen(open_own(path, os.O_RDWR | os.O_CREAT), "r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if os.stat(path).st_ino != os.fstat(lock.fileno()).st_ino:
                    continue  # the previous holder removed the file: lock the new one
            except FileNotFoundError:
                continue
            try:
                yield
                return
            finally:
                path.unlink(missing_ok=True)


def token_file(target: Path, description: CorpusDescription, mask: Path | None = None) -> TokenFile:
    """The token file that `target` and its description make up. Raises `DataError` where a file has another size."""
    file = TokenFile(
        path=target,
        dtype=description.dtype,
        num_tokens=description.num_tokens,
        max_token=description.max_token,
        digest=description.digest,
        num_documents=description.num_documents,
        starts=target.with_suffix(".starts"),
        mask=mask,
    )
    # A damaged cache is found here rather than in the middle of a run.
    for check in (file.open, file.open_starts, file.open_mask):
        check()  # compares sizes
    return file


def id_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Smallest stored dtype that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def file_identity(file: Path) -> tuple[str, int, int]:
    """Path, size and modification time of a source file. Raises `DataError` where it cannot be read."""
    try:
        status = file.stat()
    except OSError as error:
        raise DataError(f"cannot read data {file}: {error.strerror}; keep it in place") from error
    return str(file.resolve()), status.st_size, status.st_mtime_ns


@contextmanager
def writing(target: Path) -> Iterator[dict[str, int]]:
    """Turns an `OSError` inside the block into a `DataError` with its fix; the block may note `num_bytes` written."""
    noted = {"num_bytes": 0}
    try:
        yield noted
    except OSError as error:
        # A full disk and a missing permission need different fixes.
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            fix = f"stopped after {noted['num_bytes']} bytes; free some space or choose another cache folder"
        else:
            fix = "choose a cache folder that you may write to"
        raise DataError(f"cannot write the token file {target}: {error.strerror}; {fix}") from error
