"""The opened arrays of a token file: ids, document starts, training mask."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrace.data.block_sums import BlockSums
from terrace.data.token_file import TokenFile

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """A corpus as arrays, mapped read-only."""

    name: str
    ids: npt.NDArray[np.unsignedinteger]  # (num_tokens,)
    starts: Ids  # (num_documents,), rising from 0
    mask: npt.NDArray[np.unsignedinteger] | None = None  # (num_tokens,), 1: trained on; None: all are
    sums: BlockSums | None = None  # None: the arrays are no files

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def check(self, first: int, end: int) -> None:
        """Raises `DataError` if tokens `first` ... `end` - 1 or their mask differ from what was written.

        Call it before reading them.
        """
        if self.sums is not None:
            self.sums.check(first, end)


def open_documents(tokens: TokenFile, name: str = "") -> Documents:
    """Opens the arrays of `tokens` for the source `name`. Raises `DataError` for a missing or damaged file."""
    # Plain views: indexing a memmap object costs Python time for its subclass on every call.
    mask = tokens.open_mask()
    return Documents(
        name or str(tokens.path),
        np.asarray(tokens.open()),
        np.asarray(tokens.open_starts()),
        None if mask is None else np.asarray(mask),
        BlockSums(tokens),
    )
