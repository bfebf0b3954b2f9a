"""Checksums of a token file. Each block is verified when it is first read.

`NAME.sums` is little-endian uint32: the CRC-32 of each block of `BLOCK_TOKENS` tokens (ids, then mask), and last the
CRC-32 of the document starts. Its own hash is in the description, so equal hashes mean equal tokens wherever they are
read.
"""

import hashlib
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.base.files import open_atomic
from terrace.data.token_file import TokenFile

# A row of 2,048 tokens touches two blocks; the sums take 0.05 % of the bytes of the ids.
BLOCK_TOKENS = 4096
_PART = 1 << 24


def write_sums(tokens: TokenFile) -> str:
    """Writes the checksums of the files of `tokens`; returns their hash. Raises `OSError` and `DataError`."""
    ids, mask = np.asarray(tokens.open()), _plain(tokens.open_mask())
    digest = hashlib.blake2b(digest_size=16)
    with open_atomic(tokens.sums) as file:
        for first in range(0, tokens.num_tokens, _PART):
            blocks = range(first, min(first + _PART, tokens.num_tokens), BLOCK_TOKENS)
            sums = np.array([_sum(ids, mask, place) for place in blocks], dtype="<u4").tobytes()
            file.write(sums)
            digest.update(sums)
        last = np.array([_sum_of_starts(tokens)], dtype="<u4").tobytes()
        file.write(last)
        digest.update(last)
    return digest.hexdigest()


class BlockSums:
    """The checksums of a token file, and which blocks have been verified.

    Raises `DataError` for a damaged file of checksums.
    """

    def __init__(self, tokens: TokenFile) -> None:
        self._tokens = tokens
        self._ids, self._mask = np.asarray(tokens.open()), _plain(tokens.open_mask())
        num_blocks = -(-tokens.num_tokens // BLOCK_TOKENS)
        self._sums = np.asarray(tokens.open_sums(num_blocks + 1))
        digest = hashlib.blake2b(digest_size=16)
        for first in range(0, len(self._sums), _PART):
            digest.update(self._sums[first : first + _PART].data)
        if digest.hexdigest() != tokens.sums_digest:
            raise DataError(f"{tokens.sums} is damaged; delete it, and it will be made again with its tokens")
        # One byte per block, 1 once verified. Looking up a byte costs a tenth of looking up an array's element.
        self._agrees = bytearray(num_blocks)

    def check(self, first: int, end: int) -> None:
        """Raises `DataError` if the tokens `first` ... `end` - 1 differ from those that were written."""
        low, high = first // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        if self._agrees.find(0, low, high) < 0:
            return
        for block in range(low, high):
            place = block * BLOCK_TOKENS
            if not self._agrees[block] and _sum(self._ids, self._mask, place) != self._sums[block]:
                last = min(place + BLOCK_TOKENS, self._tokens.num_tokens) - 1
                raise self._damaged(self._tokens.path, f"tokens {place} to {last} are not those that were written")
            self._agrees[block] = 1

    def check_starts(self) -> None:
        """Raises `DataError` if the document starts differ from those that were written."""
        if _sum_of_starts(self._tokens) != self._sums[-1]:
            raise self._damaged(self._tokens.starts, "documents begin elsewhere than was written")

    def _damaged(self, path: Path, reason: str) -> DataError:
        # An indexed data set is used in place, and belongs to its user.
        in_place = path.suffix not in (".tokens", ".starts")
        fix = "restore it, or start anew with what it is now" if in_place else "delete it, and it will be made again"
        return DataError(f"{path} is damaged: {reason}; {fix}")


def _sum(ids: npt.NDArray[np.unsignedinteger], mask: npt.NDArray[np.uint8] | None, place: int) -> int:
    block = slice(place, place + BLOCK_TOKENS)
    found = zlib.crc32(ids[block].data)
    return found if mask is None else zlib.crc32(mask[block].data, found)


def _sum_of_starts(tokens: TokenFile) -> int:
    starts, found = np.asarray(tokens.open_starts()), 0
    for first in range(0, len(starts), _PART):
        found = zlib.crc32(starts[first : first + _PART].data, found)
    return found


def _plain(mask: "np.memmap[tuple[int], np.dtype[np.uint8]] | None") -> npt.NDArray[np.uint8] | None:
    return None if mask is None else np.asarray(mask)
