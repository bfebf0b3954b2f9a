"""Texts cut into windows for evaluation.

Every token of a text is predicted once, in windows of `sequence` tokens, after the token that begins texts. The last
window of a text reaches back and predicts only the remaining tokens, as in terrace.train.evaluate. Short windows share
a row, each as a document of its own.
"""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.data.documents import Documents
from terrace.data.packing import best_fit
from terrace.data.samples import IGNORED, Parts

Ids = npt.NDArray[np.int64]


class TextRows:
    """Sample i is row i of the windows of all texts. Raises `DataError` if no token is predicted."""

    has_positions = True

    def __init__(
        self, documents: Documents, sequence: int, begin: tuple[int, ...], end: int | None, context: int | None
    ) -> None:
        self._documents, self._sequence, self._context = documents, sequence, context
        starts, stops = _texts(documents, begin, end)
        # w is a text's tokens with the preceding one: one token more than are predicted.
        self._shift = int(context is not None)
        predicted = np.maximum(stops - starts + self._shift - 1, 0)
        num_windows = -(-predicted // sequence)
        if not num_windows.any():
            raise DataError(
                f"{documents.name} of data.eval has no token to predict: its texts are empty, or one token each; give "
                "others"
            )
        texts = np.repeat(np.arange(len(starts)), num_windows)
        numbers = np.arange(len(texts)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
        firsts = numbers * sequence  # places in w
        ends = np.minimum(firsts + sequence, predicted[texts])
        lows = np.maximum(ends - sequence, 0)
        order, self._offsets = best_fit(ends - lows, sequence)
        # By window: where its text stands in the corpus, its first and last input in w, the first that predicts.
        self._starts, self._lows = starts[texts][order], lows[order]
        self._ends, self._firsts = ends[order], firsts[order]
        self.num_samples = len(self._offsets) - 1
        self._count = np.arange(sequence)

    def fill(self, sample: int, inputs: Ids, labels: Ids, positions: Ids | None) -> None:
        """Writes the row of `sample` into arrays of shape (sequence,)."""
        assert positions is not None, "windows are kept apart"
        place, ids, shift = 0, self._documents.ids, self._shift
        for each in range(*self._offsets[sample : sample + 2].tolist()):
            low, end = int(self._lows[each]), int(self._ends[each])
            text, size = int(self._starts[each]) - shift, end - low  # w[i] is token text + i of the corpus
            into, known = slice(place, place + size), int(low == 0 and shift)
            self._documents.check(text + low + known, text + end + 1)
            inputs[place + known : place + size] = ids[text + low + known : text + end]
            if known and self._context is not None:
                inputs[place] = self._context
            labels[into] = ids[text + low + 1 : text + end + 1]
            labels[place : place + int(self._firsts[each]) - low] = IGNORED
            positions[into] = self._count[:size]
            place += size
        inputs[place:], labels[place:] = 0, IGNORED
        positions[place:] = self._count[: self._sequence - place]

    def parts(self, samples: Ids) -> list[Parts]:
        """Trained parts of each row of `samples`: its windows."""
        found = list[Parts]()
        for low, high in zip(self._offsets[samples].tolist(), self._offsets[samples + 1].tolist(), strict=True):
            bounds = np.cumsum([0, *(self._ends[low:high] - self._lows[low:high])]).tolist()
            found.append(tuple(pairwise(bounds)))
        return found


def _texts(documents: Documents, begin: tuple[int, ...], end: int | None) -> tuple[Ids, Ids]:
    """First token of each text in the corpus and one past its last, without the tokens put around it."""
    ids, starts = documents.ids, documents.starts.astype(np.int64)
    stops = np.append(starts[1:], len(ids))
    has_begin = stops - starts >= len(begin)
    for place, token in enumerate(begin):
        # An index in the corpus also where the text is shorter, which then has no beginning.
        has_begin &= ids[np.minimum(starts + place, len(ids) - 1)] == token
    starts = starts + len(begin) * has_begin
    if end is not None:
        stops = stops - ((stops > starts) & (ids[stops - 1] == end))
    return starts, stops
