"""Cached token files: naming, describing, finding and writing them.

The description, `NAME.json`, is written last: if it exists, the files beside it are complete. It holds its own checksum
and the hash of theirs (terrace.data.block_sums).
"""

import errno
import fcntl
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from terrace.base.errors import ConfigError, DataError
from terrace.base.files import open_own, sync_folder, write_atomic
from terrace.base.schema import dump, load, read_table
from terrace.data.block_sums import BlockSums, write_sums
from terrace.data.originals import Originals
from terrace.data.token_file import TokenFile


@dataclass(frozen=True, kw_only=True)
class Description:
    """Facts of a cached file. `made_once` fills in the last three fields."""

    format: str
    max_token: int
    digest: str
    num_documents: int
    sums: str = ""  # hash of the checksums
    contents: str = ""  # hash of the files that it was made from
    stamp: str = ""  # of these files when they were last compared with it; "": not to be trusted


@dataclass(frozen=True, kw_only=True)
class CorpusDescription(Description):
    """Description of a tokenised corpus; `corpus` is for display only."""

    corpus: str
    tokenizer: str
    dtype: Literal["uint16", "uint32"]
    num_tokens: int
    template: str | None = None  # of chats
    num_trained: int | None = None  # tokens of chats
    spelled: str = ""  # a token that prose spells out as characters
    num_spelled: int = 0  # how often
    left_out: str = ""  # a line on what a template and a tokenizer left out of chats


AnyDescription = TypeVar("AnyDescription", bound=Description)


def cache_file(cache_dir: str | Path, name: str, identity: object, suffix: str = ".tokens") -> Path:
    """Path of a cached file. The key is a hash of `identity`, so another source or tokenizer gets another file."""
    # JSON gives equal identities equal bytes in every process, unlike Python's hash.
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    return Path(cache_dir) / f"{name}-{key}{suffix}"


def file_stem(path: str | Path, default: str) -> str:
    """Stem of `path`, reduced to at most 40 characters that are safe in file names."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", Path(path).stem)[:40].strip("-") or default


def made_once(
    target: Path,
    suffixes: Sequence[str],
    kind: type[AnyDescription],
    make: Callable[[dict[str, int]], AnyDescription],
    opened: Callable[[AnyDescription], TokenFile],
    originals: Originals,
    progress: Callable[[str], None] = lambda text: None,
) -> TokenFile:
    """The token file at `target`, as `opened` builds it from the description; `suffixes` are those of its files.

    `make` writes the files if one is missing, or if `originals` have changed since; it may record the `num_bytes`
    written in its argument. Waits for another process that is making them. Raises `DataError` for a damaged
    description, damaged checksums or document starts, originals that change meanwhile, and a folder that cannot be
    written. An error leaves no file behind.
    """
    described, *files = (target.with_suffix(suffix) for suffix in (".json", *suffixes, ".sums"))
    with writing(target) as written:
        description = _current(described, files, kind, originals)
        if description is None:
            target.parent.mkdir(parents=True, exist_ok=True)
            with _alone(target):
                # The process that held the lock may have made them.
                description = _current(described, files, kind, originals)
                if description is None:
                    if described.exists() and _exist(*files):
                        progress(f"{originals.path} has other contents than before: it is prepared again")
                    described.unlink(missing_ok=True)
                    try:
                        description = _made(make, opened, originals, written)
                        _write(described, description)
                        # The rename itself must be on the disk before the files count as complete.
                        sync_folder(target.parent)
                    except BaseException:
                        # Files without a description would never be used nor removed.
                        for file in files if not described.exists() else ():
                            file.unlink(missing_ok=True)
                        raise
        else:
            _clear_lock(target)
    found = opened(description)
    BlockSums(found).check_starts()
    return found


def _made(
    make: Callable[[dict[str, int]], AnyDescription],
    opened: Callable[[AnyDescription], TokenFile],
    originals: Originals,
    written: dict[str, int],
) -> AnyDescription:
    is_settled, before = originals.is_settled(), originals.stamp()
    made = make(written)
    contents = originals.contents()
    # The cache is identified by the files' earlier state.
    if originals.stamp() != before:
        raise DataError(f"data {originals.path} changed while it was read; try again when nothing writes to it")
    stamp = before if is_settled else ""
    return replace(made, sums=write_sums(opened(made)), contents=contents, stamp=stamp)


def _current(
    described: Path, files: Sequence[Path], kind: type[AnyDescription], originals: Originals
) -> AnyDescription | None:
    """The description if all files exist and were made from `originals` as they are now, else None."""
    if not _exist(described, *files):
        return None
    description = _read(described, kind)
    is_settled, stamp = originals.is_settled(), originals.stamp()
    if stamp == description.stamp:
        return description
    if originals.contents() != description.contents:
        return None
    if is_settled:
        # A read-only cache is compared again next time.
        with suppress(OSError):
            _write(described, replace(description, stamp=stamp))
    return description


def _read(described: Path, kind: type[AnyDescription]) -> AnyDescription:
    try:
        table = read_table(described)
        seal = table.pop("seal", None)
        if seal != _seal(table):
            raise ConfigError("its own checksum differs")
        return load(kind, table, "tokens")
    except ConfigError as error:
        raise DataError(f"{described} is damaged ({error}); delete it, and it will be made again") from error


def _write(described: Path, description: Description) -> None:
    table = dump(description)
    write_atomic(described, json.dumps({**table, "seal": _seal(table)}, indent=2) + "\n")


def _seal(table: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(table, sort_keys=True).encode(), digest_size=8).hexdigest()


def _exist(*files: Path) -> bool:
    try:
        for file in files:
            file.stat()  # raises where the folder cannot be read
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Holds the lock on making `target` while the body runs, waiting for another process that holds it."""
    path = _lock_of(target)
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


def _clear_lock(target: Path) -> None:
    # A process that was killed while it made `target` left its file; one that is at work holds it.
    path = _lock_of(target)
    if not path.exists():
        return
    with suppress(OSError), os.fdopen(open_own(path, os.O_RDWR), "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.stat(path).st_ino == os.fstat(lock.fileno()).st_ino:
            path.unlink()


def _lock_of(target: Path) -> Path:
    return target.with_name(f".{target.stem}.lock")


def token_file(target: Path, description: CorpusDescription, mask: Path | None = None) -> TokenFile:
    return TokenFile(
        path=target,
        dtype=description.dtype,
        num_tokens=description.num_tokens,
        max_token=description.max_token,
        digest=description.digest,
        num_documents=description.num_documents,
        starts=target.with_suffix(".starts"),
        sums_digest=description.sums,
        mask=mask,
    )


def id_dtype(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Smallest stored dtype that holds every id of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


@contextmanager
def writing(target: Path) -> Iterator[dict[str, int]]:
    """Turns an `OSError` in the body into a `DataError` with its fix. The body may record `num_bytes` written in the
    yielded dict.
    """
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
