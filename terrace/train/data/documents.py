"""The arrays of a token file, opened: ids, where documents begin, and what is trained on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrace.train.data.tokens import TokenFile

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
        """How many documents there are."""
        return len(self.starts)


def open_documents(tokens: TokenFile) -> Documents:
    """Open the arrays of `tokens`. Raises `DataError` for a file that is missing or damaged."""
    # Plain views: indexing a memmap object costs Python time for its subclass on every call.
    ids = np.asarray(tokens.open())
    starts = tokens.path.with_suffix(".starts")
    mask = tokens.path.with_suffix(".mask")
    return Documents(
        str(tokens.path),
        ids,
        np.asarray(np.memmap(starts, dtype="<i8", mode="r")) if starts.exists() else np.zeros(1, dtype=np.int64),
        np.asarray(np.memmap(mask, dtype=np.uint8, mode="r")) if mask.exists() else None,
    )
