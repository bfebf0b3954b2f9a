"""The files that a cache is made from, and whether they have changed since.

Path, size and modification time identify a cache but prove nothing, because copies and backups may preserve all three.
The change time of a file's inode cannot be set by programs: while it is the same, so is the content. If it differs, as
on another machine or after a copy, contents are compared by hash, at about a gigabyte per second.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from terrace.base.errors import DataError

_BLOCK_BYTES = 1 << 22
_SETTLED_S = 2.0  # a file may change again within a tick of its file system's clock, which leaves its times as they are


@dataclass(frozen=True)
class Originals:
    """The files of the corpus `path`; `find` lists them anew at each call."""

    path: str | Path
    find: Callable[[], Sequence[Path]]

    def identity(self) -> list[tuple[str, int, int]]:
        """Path, size and modification time of each file. Raises `DataError` if a file cannot be read."""
        return [(str(file.resolve()), status.st_size, status.st_mtime_ns) for file, status in self._statuses()]

    def stamp(self) -> str:
        """A fingerprint that stays equal only if no file was written, replaced, added or removed."""
        facts = [
            f"{os.fspath(file)!r} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            for file, status in self._statuses()
        ]
        return hashlib.blake2b("\n".join(facts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def is_settled(self) -> bool:
        """Whether all files are old enough that the next change will alter the stamp."""
        return all(time.time() - status.st_ctime > _SETTLED_S for _, status in self._statuses())

    def contents(self) -> str:
        with ThreadPoolExecutor() as pool:
            digests = list(pool.map(_digest, self.find()))
        return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()

    def _statuses(self) -> list[tuple[Path, os.stat_result]]:
        found = []
        for file in self.find():
            try:
                found.append((file, file.stat()))
            except OSError as error:
                raise DataError(f"cannot read data {file}: {error.strerror}; keep it in place") from error
        return found


def _digest(file: Path) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    try:
        with file.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise DataError(f"cannot read data {file}: {error.strerror}; keep it in place") from error
    return digest.digest()
