"""The rows that a run is evaluated on: its hold-out, and sources used for evaluation only.

Texts are cut as `terrace eval` cuts them (terrace.data.text_rows); conversations are packed as in training. The choice
of rows does not depend on the ranks.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.data.batches import Arrays, Batches, Shares, Source, rows_of_rank
from terrace.data.config import HOLDOUT
from terrace.data.documents import open_documents
from terrace.data.pairs import PairRows
from terrace.data.samples import IGNORED, Packed, Parts, Windows
from terrace.data.text_rows import TextRows

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class EvalSource(Source):
    """A prepared source that is only evaluated; `begin`, `end` and `context` as in terrace.data.text_tokens."""

    begin: tuple[int, ...] = ()
    end: int | None = None
    context: int | None = None

    def samples(self, sequence: int, holdout: float = 0) -> Windows | Packed | PairRows | TextRows:
        if self.documents == "whole":
            return super().samples(sequence, holdout)
        return TextRows(open_documents(self.tokens, self.name), sequence, self.begin, self.end, self.context)


class EvalBatches:
    """The rows of one source in batches of `batch`, distributed to ranks as in terrace.data.batches.

    At most `most_batches` batches (0: all), with rows spread evenly over the source. The last batch is filled up with
    padding rows without labels.
    """

    pairs: PairRows | None = None  # not evaluated

    def __init__(self, name: str, of: Batches, rows: tuple[Ids, Ids], batch: int, most_batches: int) -> None:
        self.name, self.sequence, self.batch, self._of = name, of.sequence, batch, of
        sources, samples = rows
        self.num_found = len(samples)
        self.num_rows = min(len(samples), most_batches * batch) if most_batches else len(samples)
        taken = np.arange(self.num_rows) * len(samples) // max(1, self.num_rows)
        self._sources, self._samples = sources[taken], samples[taken]
        self.num_batches = -(-self.num_rows // batch)

    def micro_batches(
        self, step: int, data_rank: int, num_data_ranks: int, micro_batch: int, shares: Shares = ()
    ) -> list[Arrays]:
        """The micro-batches of a data rank in batch `step`: int64 arrays of shape (micro_batch, sequence)."""
        whole = self.rows(step, rows_of_rank(self.batch, data_rank, num_data_ranks, micro_batch, shares))
        ends = range(micro_batch, len(whole[0]) + 1, micro_batch)
        return [tuple(array[end - micro_batch : end] for array in whole) for end in ends]

    def rows(self, step: int, rows: Ids) -> Arrays:
        """Rows `rows` (n,) of batch `step`: inputs, labels and, if the source has them, positions; int64 (n,
        sequence).
        """
        numbers = step * self.batch + rows
        real = numbers < self.num_rows
        filled = self._of.gather(self._sources[numbers[real]], self._samples[numbers[real]])
        columns = np.arange(self.sequence)
        found = []
        for array, padding in zip(filled, (0 * columns, 0 * columns + IGNORED, columns), strict=False):
            whole = np.tile(padding, (len(rows), 1))
            whole[real] = array
            found.append(whole)
        return tuple(found)

    def parts(self, step: int) -> list[Parts]:
        """For every row of batch `step`, the column ranges of its documents with labels."""
        chosen = slice(step * self.batch, (step + 1) * self.batch)
        found = self._of.parts_of(self._sources[chosen], self._samples[chosen])
        return found + [()] * (self.batch - len(found))

    @property
    def has_labels(self) -> bool:
        return any(any(self.parts(step)) for step in range(self.num_batches))


def eval_batches(
    batches: Batches, sources: tuple[EvalSource, ...], batch: int, most_batches: int, vocab_size: int
) -> list[EvalBatches]:
    """The hold-out of the training `batches`, if any, then each of `sources`.

    Raises `DataError` for a source without a token to predict.
    """
    found = list[EvalBatches]()
    if batches.num_holdout_samples:
        found.append(EvalBatches(HOLDOUT, batches, batches.held(), batch, most_batches))
    for source in sources:
        own = Batches([source], batches.sequence, 1, 0, vocab_size=vocab_size)
        samples = np.arange(own.num_samples, dtype=np.int64)
        found.append(EvalBatches(source.name, own, (np.zeros_like(samples), samples), batch, most_batches))
    for each in found:
        if not each.has_labels:
            raise DataError(
                f"the rows of {each.name} that are evaluated have no token to predict: hold out more, or raise "
                "train.eval_batches"
            )
    return found
