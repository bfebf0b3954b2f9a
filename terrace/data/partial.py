"""A token file while it is made: what is written goes on after a kill, from the last note of how far it was.

Beside the file to be made stand hidden ones: `.NAME.tokens.partial` and `.NAME.starts.partial`, which only grow, and
`.NAME.journal.json`, the note: how much of both is sound, and what is known of it. Whoever goes on cuts off what lies
beyond, and reads the ids once for their checksum and digest. A lock on `.NAME.lock` keeps others waiting meanwhile.
"""

import fcntl
import hashlib
import json
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError
from terrace.base.files import write_atomic
from terrace.base.schema import load, read_table

_READ_BYTES = 1 << 24


@dataclass(kw_only=True)
class Noted:
    """How far a token file is, and what is known of its ids."""

    num_units: int = 0  # of the corpus that are done
    num_bytes: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_empty: int = 0  # documents without text
    max_token: int = -1
    has_text: bool = False  # other than white space
    begins: bool = True  # whether the next piece begins a document
    crc: int = 0


class Partial:
    """The ids and the starts of documents of `target`, as they are written; under its lock."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.noted = Noted()
        self.digest = hashlib.blake2b(digest_size=16)
        self._journal = target.with_name(f".{target.stem}.journal.json")
        self._paths = [target.with_name(f".{target.stem}.{kind}.partial") for kind in ("tokens", "starts")]
        if not self._goes_on():
            self.noted, self.digest = Noted(), hashlib.blake2b(digest_size=16)
            self._journal.unlink(missing_ok=True)
            for path in self._paths:
                path.write_bytes(b"")
        self._files: list[IO[bytes]] = [path.open("ab", buffering=1 << 20) for path in self._paths]

    def add(self, ids: npt.NDArray[np.int64], raw: bytes, ends_document: bool) -> None:
        """Append the ids of a piece, and `raw`, the same as they are stored."""
        noted = self.noted
        if ids.size:
            self._files[0].write(raw)
            if noted.begins:
                self._files[1].write(noted.num_tokens.to_bytes(8, "little"))
                noted.num_documents += 1
            noted.num_tokens += ids.size
            noted.num_bytes += len(raw)
            noted.max_token = max(noted.max_token, int(ids.max()))
            noted.crc = zlib.crc32(raw, noted.crc)
            self.digest.update(raw)
        noted.begins = ends_document or (noted.begins and not ids.size)

    def note(self, num_units: int) -> None:
        """Make sure of what is written: whoever goes on begins after `num_units` units of the corpus."""
        self.noted.num_units = num_units
        self._sync()
        write_atomic(self._journal, json.dumps(asdict(self.noted)) + "\n")

    def finish(self) -> None:
        """Put both files in their places."""
        self._sync()
        self.close()
        for path, suffix in zip(self._paths, (".tokens", ".starts"), strict=True):
            os.chmod(path, 0o644)
            os.replace(path, self.target.with_suffix(suffix))
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the files; what is noted stays for who goes on."""
        for file in self._files:
            try:
                file.close()
            except OSError:  # a full disk refuses what was not written yet; it is not noted
                continue

    def remove(self) -> None:
        """Leave nothing behind."""
        self.close()
        for path in (*self._paths, self._journal):
            path.unlink(missing_ok=True)

    def _sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _goes_on(self) -> bool:
        """Whether there is something sound to go on from; then both files end with it."""
        if not self._journal.exists():
            return False
        try:
            self.noted = load(Noted, read_table(self._journal), "journal")
        except ConfigError:
            return False
        sizes = (self.noted.num_bytes, 8 * self.noted.num_documents)
        for path, size in zip(self._paths, sizes, strict=True):
            if not path.exists() or path.stat().st_size < size:
                return False
            os.truncate(path, size)
        crc = 0
        with self._paths[0].open("rb") as file:
            while block := file.read(_READ_BYTES):
                crc = zlib.crc32(block, crc)
                self.digest.update(block)
        return crc == self.noted.crc


@contextmanager
def alone(target: Path) -> Iterator[None]:
    """Wait until no other process makes `target`, and keep others waiting."""
    path = target.with_name(f".{target.stem}.lock")
    while True:
        with path.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                if os.stat(path).st_ino != os.fstat(lock.fileno()).st_ino:
                    continue  # whoever had it has removed it meanwhile
            except FileNotFoundError:
                continue
            try:
                yield
                return
            finally:
                path.unlink(missing_ok=True)
