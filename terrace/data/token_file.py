"""Token ids in a memory-mapped file, and their description."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from terrace.base.errors import DataError

Stored = Literal["uint8", "int16", "uint16", "int32", "uint32", "int64"]


@dataclass(frozen=True, kw_only=True)
class TokenFile:
    """A prepared corpus. `digest` is a hash of its contents, equal on every machine with the same data; `sums_digest`
    is the hash of its checksums (terrace.data.block_sums).
    """

    path: Path
    dtype: Stored
    num_tokens: int
    max_token: int
    digest: str
    num_documents: int  # with at least one token
    starts: Path
    sums_digest: str
    mask: Path | None = None  # None: every token is trained on

    def open(self) -> "np.memmap[tuple[int], np.dtype[np.unsignedinteger]]":
        """Maps the ids read-only, shape (num_tokens,), dtype `dtype`.

        Raises `DataError` when the file is missing, unreadable or of the wrong size.
        """
        return _map(self.path, np.dtype(self.dtype), self.num_tokens, f"tokens of {self.dtype}")

    def open_starts(self) -> "np.memmap[tuple[int], np.dtype[np.int64]]":
        """Maps the document starts read-only, int64 of shape (num_documents,), ascending from 0.

        Raises `DataError` as `open` does.
        """
        return _map(self.starts, np.dtype(np.int64), self.num_documents, "starts of documents")

    def open_mask(self) -> "np.memmap[tuple[int], np.dtype[np.uint8]] | None":
        """Maps the mask read-only, uint8 of shape (num_tokens,), 1 for trained tokens; None if all tokens are trained
        on.

        Raises `DataError` as `open` does.
        """
        if self.mask is None:
            return None
        return _map(self.mask, np.dtype(np.uint8), self.num_tokens, "tokens of a mask")

    @property
    def sums(self) -> Path:
        return self.starts.with_suffix(".sums")

    def open_sums(self, count: int) -> "np.memmap[tuple[int], np.dtype[np.uint32]]":
        """Maps the checksums read-only, uint32 of shape (count,). Raises `DataError` as `open` does."""
        return _map(self.sums, np.dtype(np.uint32), count, "checksums")

    def check_vocab(self, vocab_size: int) -> None:
        """Raises `DataError` if this file has an id outside a vocabulary of `vocab_size`."""
        if self.max_token >= vocab_size:
            raise DataError(
                f"{self.path} holds token id {self.max_token}, but the model's vocab_size is {vocab_size}; "
                f"give the model a vocab_size of at least {self.max_token + 1} or use its own tokenizer"
            )


def _map(path: Path, dtype: np.dtype[Any], count: int, what: str) -> "np.memmap[tuple[int], np.dtype[Any]]":
    # Files are little-endian on every machine.
    dtype = dtype.newbyteorder("<")
    expected = count * dtype.itemsize
    try:
        size = path.stat().st_size
        # An empty file cannot be mapped.
        if size != expected or expected == 0:
            raise DataError(
                f"{path} is damaged: it has {size} bytes, but {count} {what} take {expected}; delete it, and it "
                "will be made again"
            )
        return np.memmap(path, dtype=dtype, mode="r", shape=(count,))
    except OSError as error:
        raise DataError(f"cannot read the token file {path}: {error.strerror}; prepare the data again") from error
