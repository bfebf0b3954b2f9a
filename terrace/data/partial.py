"""A token file while it is being written. After a kill, writing continues from the last journal entry.

Hidden files lie beside the target: `.NAME.tokens.partial` and `.NAME.starts.partial`, which only grow, and
`.NAME.journal.json`, which records how much of both is valid. The process that continues truncates the rest, and reads
the ids once for their checksum and digest.
"""

import hashlib
import json
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from terrace.base.errors import ConfigError
from terrace.base.files import open_atomic, open_own, read_bounded
from terrace.base.fitting import parse_table
from terrace.base.schema import load
from terrace.base.sealed import sealed_json

_READ_BYTES = 1 << 24


@dataclass(kw_only=True)
class Noted:
    """The journal: progress of a token file, and running statistics of its ids."""

    stamp: str  # of the files of the corpus
    num_units: int = 0  # finished units of it
    num_bytes: int = 0
    num_tokens: int = 0
    num_documents: int = 0
    num_empty: int = 0  # documents without text
    max_token: int = -1
    has_text: bool = False  # other than white space
    spelled: str = ""  # a token that prose spells out as characters
    num_spelled: int = 0  # how often
    begins: bool = True  # whether the next piece begins a document
    crc: int = 0  # of the ids
    starts_crc: int = 0


class Partial:
    """The ids and document starts of `target` while they are written. Use inside `made_once`."""

    def __init__(self, target: Path, stamp: str) -> None:
        self.target = target
        self.noted = Noted(stamp=stamp)
        self.digest = hashlib.blake2b(digest_size=16)
        self._journal = target.with_name(f".{target.stem}.journal.json")
        self._paths = [target.with_name(f".{target.stem}.{kind}.partial") for kind in ("tokens", "starts")]
        # Anything unsound is discarded and written anew.
        if not self._can_resume():
            self.noted, self.digest = Noted(stamp=stamp), hashlib.blake2b(digest_size=16)
            self._journal.unlink(missing_ok=True)
            for path in self._paths:
                path.unlink(missing_ok=True)
                os.close(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        handles = [open_own(path, os.O_WRONLY | os.O_APPEND) for path in self._paths]
        self._files: list[IO[bytes]] = [os.fdopen(handle, "ab", buffering=1 << 20) for handle in handles]

    def add(self, ids: npt.NDArray[np.int64], raw: bytes, ends_document: bool) -> None:
        """Appends the ids of a piece; `raw` holds the same ids as stored."""
        noted = self.noted
        # A document begins with its first token, so a piece without ids does not begin one.
        if ids.size:
            self._files[0].write(raw)
            if noted.begins:
                start = noted.num_tokens.to_bytes(8, "little")
                self._files[1].write(start)
                noted.starts_crc = zlib.crc32(start, noted.starts_crc)
                noted.num_documents += 1
            noted.num_tokens += ids.size
            noted.num_bytes += len(raw)
            noted.max_token = max(noted.max_token, int(ids.max()))
            noted.crc = zlib.crc32(raw, noted.crc)
            self.digest.update(raw)
        noted.begins = ends_document or (noted.begins and not ids.size)

    def note(self, num_units: int) -> None:
        """Makes the written data durable. The next process continues after `num_units` units of the corpus."""
        self.noted.num_units = num_units
        self._sync()
        # The journal may only count bytes that are on the disk.
        with open_atomic(self._journal) as file:  # replaces a link, where `write_atomic` would follow it
            file.write(sealed_json(json.dumps(asdict(self.noted))).encode())

    def finish(self) -> None:
        self._sync()
        self.close()
        for path, suffix in zip(self._paths, (".tokens", ".starts"), strict=True):
            os.replace(path, self.target.with_suffix(suffix))
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the files. The journal stays for the process that continues."""
        for file in self._files:
            try:
                file.close()
            except OSError:  # a full disk refuses buffered bytes, which the journal does not count
                continue

    def remove(self) -> None:
        self.close()
        for path in (*self._paths, self._journal):
            path.unlink(missing_ok=True)

    def _sync(self) -> None:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())

    def _can_resume(self) -> bool:
        if not self._journal.exists():
            return False
        try:
            noted = load(Noted, parse_table(read_bounded(self._journal).decode()), "journal")
        except (ConfigError, OSError, ValueError):
            return False
        # The corpus is no longer what the first part was made from.
        if noted.stamp != self.noted.stamp:
            return False
        self.noted = noted
        sizes = (self.noted.num_bytes, 8 * self.noted.num_documents)
        try:
            # Checked, cut and read by descriptor: a name could become a link meanwhile.
            with (
                os.fdopen(open_own(self._paths[0], os.O_RDWR), "rb+") as tokens,
                os.fdopen(open_own(self._paths[1], os.O_RDWR), "rb+") as starts,
            ):
                for file, size in zip((tokens, starts), sizes, strict=True):
                    # Fewer bytes than the journal counts: the file is not the journal's.
                    if os.fstat(file.fileno()).st_size < size:
                        return False
                    # Bytes after the journal entry may be torn.
                    os.ftruncate(file.fileno(), size)
                crc, starts_crc = 0, 0
                # The checksum finds bytes that the disk lost; the digest needs them all in any case.
                while block := tokens.read(_READ_BYTES):
                    crc = zlib.crc32(block, crc)
                    self.digest.update(block)
                while block := starts.read(_READ_BYTES):
                    starts_crc = zlib.crc32(block, starts_crc)
        # A missing file, or a link.
        except OSError:
            return False
        return (crc, starts_crc) == (self.noted.crc, self.noted.starts_crc)
