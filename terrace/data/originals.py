"""The files that a cache is made from, and whether they have changed since they were read.

Path, size and modification time find a cache; they prove nothing, since copies and backups may keep all three. No
program can set the change time of a file's inode: while it is the same, so is the content. Where it differs, as on
another machine or after a copy, contents are compared by their hash, at about a gigabyte a second.
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
    """The files of the corpus `path`, as `find` lists them at each call."""

    path: str | Path
    find: Callable[[], Sequence[Path]]

    def identity(self) -> list[tuple[str, int, int]]:
        """Path, size and modification time of each file. Raises `DataError` where one cannot be read."""
        return [(str(file.resolve()), status.st_size, status.st_mtime_ns) for file, status in self._statuses()]

    def stamp(self) -> str:
        """Equal at two times only if no file was written, replaced, added or removed between them."""
        facts = [
            f"{os.fspath(file)!r} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
            for file, status in self._statuses()
        ]
        return hashlib.blake2b("\n".join(facts).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def is_settled(self) -> bool:
        """Whether the next change will show in the stamp."""
        return all(time.time() - status.st_ctime > _SETTLED_S for _, status in self._statuses())

    def contents(self) -> str:
        """Hash of the bytes of all files."""
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
