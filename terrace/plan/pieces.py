"""Pieces in which a tensor that is kept below the device as a whole is read and written (terrace.plan.kept)."""

from functools import lru_cache
from typing import NamedTuple

from terrace.plan.keep import MARK_BYTES, SECTOR_BYTES


class Piece(NamedTuple):
    """A piece of a group or of a tensor: the elements it has room for, and its bytes."""

    numel: int
    num_bytes: int


@lru_cache(maxsize=4096)
def whole_pieces(size: int, numel: int, item: int) -> tuple[Piece, ...]:
    """Pieces of up to `size` elements of a tensor of `numel` elements of `item` bytes."""
    return tuple(
        Piece(each, with_mark(each * item)) for each in (min(size, numel - start) for start in range(0, numel, size))
    )


def with_mark(num_bytes: int) -> int:
    """Bytes of a piece with so many of values."""
    return -(-(num_bytes + MARK_BYTES) // SECTOR_BYTES) * SECTOR_BYTES
