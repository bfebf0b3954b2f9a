"""From a sample's number to its row: inputs, labels and, if documents are kept apart, positions.

Rows are filled one by one, document by document. Copying runs of tokens costs little more than copying their bytes, and
samples need not be sorted by source.

Three ways to make sequences of documents, chosen by `data.documents`:

    join      windows of the token stream; windows and attention run across document ends. No positions.
    separate  the same windows; attention stays within a document, and the last token of a document has no label.
    whole     whole documents, packed (terrace.data.packing); attention stays within a document.

A **position** is a token's index within the part of its document that is in the row. It is 0 at the start of a
document, and also at the start of a window that cuts one: the tokens before it are not visible. Padding is a document
of its own without labels.

If the data have a mask (1: trained on), labels of masked tokens are ignored.

The *trained parts* of a row are its documents that have a label, as ascending half-open column ranges. They are known
without reading a token.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.base.words import counted
from terrace.data.documents import Documents
from terrace.data.packing import Packing

IGNORED = -100  # the label of a place that has no target, as everywhere in this project

Ids = npt.NDArray[np.int64]
Parts = tuple[tuple[int, int], ...]  # of a row


class Windows:
    """Sample i is the window of tokens i*sequence ... (i+1)*sequence, both included.

    Its first `sequence` tokens are the input, its last `sequence` tokens the labels, so every token except the first of
    the file is a label in exactly one window. A tail shorter than a window is not used.
    """

    def __init__(self, documents: Documents, sequence: int, *, separate: bool) -> None:
        if len(documents.ids) < sequence + 1:
            longest = len(documents.ids) - 1
            shorter = f" or set sequence to at most {longest}" if longest > 0 else ""
            raise DataError(
                f"{documents.name} has {counted(len(documents.ids), 'token')}, but one sample of sequence {sequence} "
                f"takes {sequence + 1}; give more data{shorter}"
            )
        # Neighbouring windows share one token, so n windows need n * sequence + 1 tokens.
        self.num_samples = (len(documents.ids) - 1) // sequence
        self.has_positions = separate
        self._sequence = sequence
        self._count = np.arange(sequence)
        self._documents = documents
        self._starts = documents.starts
        self._ids, self._mask = documents.ids, documents.mask

    def fill(self, sample: int, inputs: Ids, labels: Ids, positions: Ids | None) -> None:
        """Writes the row of `sample` into arrays of shape (sequence,). In `positions`, joined documents count as
        one.
        """
        first, end = sample * self._sequence, (sample + 1) * self._sequence
        self._documents.check(first, end + 1)
        inputs[:] = self._ids[first:end]
        labels[:] = self._ids[first + 1 : end + 1]
        if self._mask is not None:
            labels[self._mask[first + 1 : end + 1] == 0] = IGNORED
        if positions is None:
            return
        begin = 0
        for start in self._inside(first) if self.has_positions else ():
            # The last token of a document would predict the first of the next.
            labels[start - 1] = IGNORED
            positions[begin:start] = self._count[: start - begin]
            begin = start
        positions[begin:] = self._count[: self._sequence - begin]

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`, shape (n,)."""
        return [self._parts(int(sample)) for sample in samples]

    def _parts(self, sample: int) -> Parts:
        first, size = sample * self._sequence, self._sequence
        self._documents.check(first, first + size + 1)
        ends = self._inside(first) if self.has_positions else []  # the documents before end there
        has_label = np.ones(size, dtype=bool) if self._mask is None else self._mask[first + 1 : first + size + 1] != 0
        # As in `fill`: the last token of a document has no label.
        has_label[[end - 1 for end in ends]] = False
        bounds = [0, *(end for end in ends if end < size), size]
        return tuple((begin, end) for begin, end in pairwise(bounds) if has_label[begin:end].any())

    def _inside(self, first: int) -> list[int]:
        """Columns 1 ... sequence at which documents start, for the window that begins at token `first`."""
        # side="right": a document that begins with the window needs no mark.
        low, high = self._starts.searchsorted((first, first + self._sequence), side="right")
        columns: list[int] = (self._starts[low:high] - first).tolist()
        return columns


class Packed:
    """Sample i is sequence i of a packing."""

    has_positions = True

    def __init__(self, documents: Documents, sequence: int, packing: Packing) -> None:
        self.num_samples = len(packing.offsets) - 1
        self._sequence = sequence
        self._documents = documents
        self._packing = packing
        self._count = np.arange(sequence)

    def fill(self, sample: int, inputs: Ids, labels: Ids, positions: Ids) -> None:
        """Writes the row of `sample` into arrays of shape (sequence,)."""
        packing, ids, mask = self._packing, self._documents.ids, self._documents.mask
        low, high = packing.offsets[sample : sample + 2].tolist()
        end = 0
        for start, length in zip(packing.starts[low:high].tolist(), packing.lengths[low:high].tolist(), strict=True):
            place, end = slice(end, end + length), end + length
            self._documents.check(start, start + length + 1)
            inputs[place] = ids[start : start + length]
            labels[place] = ids[start + 1 : start + length + 1]
            positions[place] = self._count[:length]
            if mask is not None:
                labels[place][mask[start + 1 : start + length + 1] == 0] = IGNORED
        # Padding is token 0 without a label, and a document of its own: no token of a real one can see it.
        inputs[end:], labels[end:] = 0, IGNORED
        positions[end:] = self._count[: self._sequence - end]

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`, shape (n,): all documents, since only documents with a label are
        packed.
        """
        packing = self._packing
        bounds = zip(packing.offsets[samples].tolist(), packing.offsets[samples + 1].tolist(), strict=True)
        return [tuple(pairwise([0, *np.cumsum(packing.lengths[low:high]).tolist()])) for low, high in bounds]
