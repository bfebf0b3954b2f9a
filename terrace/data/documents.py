"""The opened arrays of a token file: ids, document starts, training mask."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrace.data.token_file import TokenFile

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Documents:
    """A corpus as arrays, mapped read-only."""

    name: str
    ids: npt.NDArray[np.unsignedinteger]  # (num_tokens,)
    starts: Ids  # (num_documents,), rising from 0
    mask: npt.NDArray[np.unsignedinteger] | None = None  # (num_tokens,), 1: trained on; None: all are

    @property
    def num_documents(self) -> int:
        return len(self.starts)


def open_documents(tokens: TokenFile, name: str = "") -> Documents:
    """Opens the arrays of `tokens` for the source `name`. Raises `DataError` for a missing or damaged file."""
    # Plain views: indexing a memmap object costs Python time for its subclass on every call.
    mask = tokens.open_mask()
    return Documents(
        name or str(tokens.path),
        np.asarray(tokens.open()),
        np.asarray(tokens.open_starts()),
        None if mask is None else np.asarray(mask),
    )
