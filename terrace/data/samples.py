"""From a sample's number to its row: inputs, labels and, where documents are kept apart, positions.

Three ways to make sequences of documents, chosen by `data.documents`:

    join      windows of the token stream; windows and attention run across document ends. No positions.
    separate  the same windows; attention stays within a document, and the last token of a document has no label.
    whole     whole documents, packed (terrace.data.packing); attention stays within a document.

A **position** is a token's index within the part of its document that is in the row, so 0 starts a document, also at
the start of a window that cuts one: the tokens before it are not there to attend to. Padding is a document of its own
without labels.

Where the data have a mask (1: trained on), labels of masked tokens are ignored.

The *trained parts* of a row are its documents that have a label: half-open ranges of columns, ascending, known without
reading a token.
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
Rows = tuple[Ids, Ids, Ids | None]  # inputs, labels, positions; each (n, sequence)
Parts = tuple[tuple[int, int], ...]  # of a row


class Windows:
    """Sample i is the window of tokens i*sequence ... (i+1)*sequence, both included.

    Its first `sequence` tokens are the input, its last `sequence` the labels, so every token except the first of the
    file is a label of exactly one window. A tail shorter than a window is not used.
    """

    def __init__(self, documents: Documents, sequence: int, *, separate: bool) -> None:
        if len(documents.ids) < sequence + 1:
            raise DataError(
                f"{documents.name} has {counted(len(documents.ids), 'token')}, but one sample of sequence {sequence} "
                f"takes {sequence + 1}; give more data or set sequence to at most {max(1, len(documents.ids) - 1)}"
            )
        # Neighbouring windows share one token, so n windows need n * sequence + 1 tokens.
        self.num_samples = (len(documents.ids) - 1) // sequence
        self.has_positions = separate
        self._sequence = sequence
        self._documents = documents
        self._starts = documents.starts
        # (num_windows, sequence + 1), overlapping by one token; no copy
        self._windows = _windows(documents.ids, sequence)
        self._mask = None if documents.mask is None else _windows(documents.mask, sequence)

    def rows(self, samples: Ids) -> Rows:
        """Rows of `samples`, shape (n,)."""
        for sample in samples.tolist():
            self._check(sample)
        whole = self._windows[samples]  # (n, sequence + 1), a copy in the stored dtype
        inputs, labels = whole[:, :-1].astype(np.int64), whole[:, 1:].astype(np.int64)
        if self._mask is not None:
            labels[self._mask[samples, 1:] == 0] = IGNORED
        if not self.has_positions:
            return inputs, labels, None
        firsts = samples * self._sequence
        # All document starts inside the windows of all samples at once: their row and their column.
        # side="right": a document that begins with the window needs no mark.
        low = np.searchsorted(self._starts, firsts, side="right")
        row, which = _runs(low, np.searchsorted(self._starts, firsts + self._sequence, side="right"))
        columns = self._starts[which] - firsts[row]  # starts of documents: 1 ... sequence
        # The last token of a document would predict the first of the next.
        labels[row, columns - 1] = IGNORED
        # The running maximum of the start columns gives each token the start of its own document.
        begins = np.zeros_like(inputs)
        inside = columns < self._sequence
        begins[row[inside], columns[inside]] = columns[inside]
        return inputs, labels, np.arange(self._sequence) - np.maximum.accumulate(begins, axis=1)

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`, shape (n,)."""
        return [self._parts(int(sample)) for sample in samples]

    def _check(self, sample: int) -> None:
        first = sample * self._sequence
        self._documents.check(first, first + self._sequence + 1)

    def _parts(self, sample: int) -> Parts:
        self._check(sample)
        first, size = sample * self._sequence, self._sequence
        ends = np.zeros(0, dtype=np.int64)
        if self.has_positions:
            low, high = np.searchsorted(self._starts, (first, first + size), side="right")
            ends = self._starts[low:high] - first  # starts of documents, 1 ... size; the documents before end there
        has_label = np.ones(size, dtype=bool) if self._mask is None else self._mask[sample, 1:] != 0
        # As in `rows`: the last token of a document has no label.
        has_label[ends - 1] = False
        bounds = [0, *ends[ends < size].tolist(), size]
        return tuple((begin, end) for begin, end in pairwise(bounds) if has_label[begin:end].any())


class Packed:
    """Sample i is sequence i of a packing."""

    has_positions = True

    def __init__(self, documents: Documents, sequence: int, packing: Packing) -> None:
        self.num_samples = len(packing.offsets) - 1
        self._sequence = sequence
        self._documents = documents
        self._packing = packing
        self._count = np.arange(sequence)

    def rows(self, samples: Ids) -> Rows:
        """Rows of `samples`, shape (n,)."""
        packing, ids, mask = self._packing, self._documents.ids, self._documents.mask
        shape = len(samples), self._sequence
        # Padding is token 0 without a label.
        inputs, labels = np.zeros(shape, dtype=np.int64), np.full(shape, IGNORED, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64)
        bounds = zip(packing.offsets[samples].tolist(), packing.offsets[samples + 1].tolist(), strict=True)
        for row, (low, high) in enumerate(bounds):
            # Copies of runs: a run of any length costs little more than its bytes.
            end = 0
            for start, length in zip(
                packing.starts[low:high].tolist(), packing.lengths[low:high].tolist(), strict=True
            ):
                place, end = slice(end, end + length), end + length
                self._documents.check(start, start + length + 1)
                inputs[row, place] = ids[start : start + length]
                labels[row, place] = ids[start + 1 : start + length + 1]
                positions[row, place] = self._count[:length]
                if mask is not None:
                    labels[row, place][mask[start + 1 : start + length + 1] == 0] = IGNORED
            # Padding is a document of its own: no token of a real one can see it.
            positions[row, end:] = self._count[: self._sequence - end]
        return inputs, labels, positions

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`, shape (n,): all documents, since others are not packed."""
        packing = self._packing
        bounds = zip(packing.offsets[samples].tolist(), packing.offsets[samples + 1].tolist(), strict=True)
        return [tuple(pairwise([0, *np.cumsum(packing.lengths[low:high]).tolist()])) for low, high in bounds]


def _windows(values: npt.NDArray[np.unsignedinteger], sequence: int) -> npt.NDArray[np.unsignedinteger]:
    return np.lib.stride_tricks.sliding_window_view(values, sequence + 1)[::sequence]


def _runs(low: Ids, high: Ids) -> tuple[Ids, Ids]:
    """The numbers low[i] ... high[i] - 1 for all i, concatenated, and the i of each."""
    counts = high - low
    owner = np.repeat(np.arange(len(counts)), counts)
    return owner, np.arange(len(owner)) - (np.cumsum(counts) - counts - low)[owner]
