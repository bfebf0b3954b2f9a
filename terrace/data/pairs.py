"""Rows of pairs: sample 2 k is the preferred response to the k-th prompt, sample 2 k + 1 the rejected one.

A row is one document, prompt and response, padded at the end and never cut. Only the response has labels. A run
permutes pairs, so both members of a pair are adjacent.
"""

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.data.documents import Documents
from terrace.data.order import SampleOrder
from terrace.data.samples import IGNORED, Parts

Ids = npt.NDArray[np.int64]


class PairRows:
    """The rows of a corpus of pairs. Raises `DataError` for a document longer than `sequence`."""

    has_positions = False

    def __init__(self, documents: Documents, sequence: int) -> None:
        self.num_samples = documents.num_documents
        self._documents, self._sequence = documents, sequence
        ends = np.append(documents.starts[1:], len(documents.ids))
        self.lengths: Ids = ends - documents.starts
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > sequence:
            raise DataError(
                f"the {('preferred', 'rejected')[longest % 2]} response of pair {longest // 2 + 1} of {documents.name} "
                f"has {self.lengths[longest]} tokens with its prompt, and a pair is never cut: raise train.sequence to "
                f"{self.lengths[longest]}, or drop longer pairs"
            )

    def fill(self, sample: int, inputs: Ids, labels: Ids, positions: Ids | None) -> None:
        """Writes the row of `sample` into arrays of shape (sequence,)."""
        assert positions is None, "a row is one document"
        start, length = int(self._documents.starts[sample]), int(self.lengths[sample])
        self._documents.check(start, start + length)
        assert self._documents.mask is not None, "pairs have a mask"
        inputs[:length], inputs[length:] = self._documents.ids[start : start + length], 0
        labels[:] = IGNORED
        is_label = self._documents.mask[start + 1 : start + length] != 0
        labels[: length - 1][is_label] = self._documents.ids[start + 1 : start + length][is_label]

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`: the whole document."""
        return [((0, int(self.lengths[sample])),) for sample in samples]


class PairOrder:
    """The sample at every position of a run: a permutation of pairs, with the two members of a pair adjacent."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self._pairs = SampleOrder(num_samples // 2, seed)

    def sample(self, positions: npt.ArrayLike) -> Ids:
        at = np.asarray(positions, dtype=np.int64)
        found: Ids = 2 * self._pairs.sample(at // 2) + at % 2
        return found
