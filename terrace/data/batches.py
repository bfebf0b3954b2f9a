"""Which tokens each rank sees at each step.

Shapes: batch = samples of a global step, micro_batch = samples of one micro-batch of one data rank,
sequence = tokens of a sample.

A sample is a row of `sequence` tokens, made from the documents of one source (terrace.data.samples). The
sources give samples at a steady rate by weight (terrace.data.mixture); each is shuffled by its own
`SampleOrder`, so it has its own epochs, and those of a small source with a large weight are short.

Step s takes the global positions s*batch ... (s+1)*batch - 1. Micro-batch m of data rank r holds, of these,
`micro_batch` in a row from (m*num_data_ranks + r)*micro_batch. So the micro-batches of all ranks together are the
global batch, whatever the world size, every rank has the same number of them, and any step can be had at once.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.data.documents import Documents, open_documents
from terrace.data.mixture import Blend
from terrace.data.order import SampleOrder
from terrace.data.packing import Packing, Tally, packed
from terrace.data.samples import Packed, Parts, Rows, Windows
from terrace.data.sources import Documented, TooLong
from terrace.data.token_file import TokenFile

Ids = npt.NDArray[np.int64]
Arrays = tuple[Ids, ...]  # inputs, labels and, where documents are kept apart, positions


@dataclass(frozen=True, kw_only=True)
class Source:
    """A prepared corpus and its part in a run."""

    tokens: TokenFile
    name: str = ""
    weight: float = 1.0
    documents: Documented = "join"
    too_long: TooLong = "refuse"

    def packing(self, sequence: int) -> Packing:
        """Return how the whole documents stand in sequences; made on the first call, then kept in a file."""
        assert self.documents == "whole", "only whole documents are packed"
        return packed(self._opened(), sequence, self.too_long, self.tokens.path)

    def samples(self, sequence: int) -> Windows | Packed:
        """Return the samples of this source. Raises `DataError` where there is none."""
        if self.documents == "whole":
            return Packed(self._opened(), sequence, self.packing(sequence))
        return Windows(self._opened(), sequence, separate=self.documents == "separate")

    def _opened(self) -> Documents:
        return open_documents(self.tokens, self.name)

    def facts(self) -> dict[str, Any]:
        """Return what of this source decides which tokens a step sees, as a checkpoint keeps it."""
        too_long = {"too_long": self.too_long} if self.documents == "whole" else {}
        return {"digest": self.tokens.digest, "weight": self.weight, "documents": self.documents, **too_long}


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """What a run takes from a source."""

    name: str
    num_samples: int  # that are trained on, in an epoch
    num_holdout_samples: int
    num_taken: int  # in all steps
    tally: Tally | None  # where whole documents are packed

    @property
    def epochs(self) -> float:
        """How often the run goes through the source."""
        return self.num_taken / self.num_samples


class Batches:
    """Training batches of a token file or of weighted sources, and the samples held out, never trained on.

    `holdout` is a share of each source's samples below 1, or else how many of each; they are its last ones. Where text
    is cut into windows, the first that is held out shares one token with training: it is the last label there, only an
    input here. Raises `DataError` for sizes below one, a source without a whole sample, and a holdout that leaves
    nothing to train on.
    """

    def __init__(
        self,
        sources: TokenFile | Sequence[Source],
        sequence: int,
        batch: int,
        seed: int,
        holdout: float = 0,
    ) -> None:
        for name, value, least in (("sequence", sequence, 1), ("batch", batch, 1), ("holdout", holdout, 0)):
            if value < least:
                raise DataError(f"{name} = {value} must be at least {least}; raise it")
        self.sources = (Source(tokens=sources),) if isinstance(sources, TokenFile) else tuple(sources)
        self.sequence = sequence
        self.batch = batch
        self._samples = [source.samples(sequence) for source in self.sources]
        self._held = [
            _num_held(source, samples.num_samples, holdout)
            for source, samples in zip(self.sources, self._samples, strict=True)
        ]
        self._orders = [
            SampleOrder(samples.num_samples - held, seed)
            for samples, held in zip(self._samples, self._held, strict=True)
        ]
        self._blend = Blend([source.weight for source in self.sources])
        self.has_positions = any(samples.has_positions for samples in self._samples)
        self.num_samples = sum(order.num_samples for order in self._orders)
        self.num_holdout_samples = sum(self._held)

    def uses(self, num_steps: int) -> list[SourceUse]:
        """Return what the first `num_steps` steps take from each source."""
        taken = self._blend.counts(num_steps * self.batch)
        return [
            SourceUse(
                name=source.name or str(source.tokens.path),
                num_samples=order.num_samples,
                num_holdout_samples=held,
                num_taken=count,
                tally=source.packing(self.sequence).tally if source.documents == "whole" else None,
            )
            for source, order, held, count in zip(self.sources, self._orders, self._held, taken, strict=True)
        ]

    def global_batch(self, step: int) -> Arrays:
        """Return inputs, labels and, if `has_positions`, positions of `step`, each int64 of shape (batch, sequence)."""
        return self._at(step * self.batch, self.batch)

    def micro_batch(self, step: int, micro: int, data_rank: int, num_data_ranks: int, micro_batch: int) -> Arrays:
        """Return one micro-batch, its arrays each int64 of shape (micro_batch, sequence).

        `micro` counts from 0 to batch / (num_data_ranks * micro_batch). Raises `DataError` when that is
        not a whole number.
        """
        if micro_batch < 1 or num_data_ranks < 1 or self.batch % (num_data_ranks * micro_batch):
            raise DataError(
                f"batch = {self.batch} is not a multiple of num_data_ranks = {num_data_ranks} times "
                f"micro_batch = {micro_batch}; change one of them"
            )
        num_micros = self.batch // (num_data_ranks * micro_batch)
        assert 0 <= data_rank < num_data_ranks, f"data_rank {data_rank} of {num_data_ranks}"
        assert 0 <= micro < num_micros, f"micro {micro} of {num_micros}"
        first = step * self.batch + (micro * num_data_ranks + data_rank) * micro_batch
        return self._at(first, micro_batch)

    def rows(self, step: int, rows: Ids) -> Arrays:
        """Return `rows`, shape (n,), of the global batch of `step`, the arrays each int64 of shape (n, sequence)."""
        return self._gather(*self._placed(step * self.batch + rows))

    def parts(self, step: int) -> list[Parts]:
        """Return, for every row of the global batch of `step`, its documents that have a label. Reads no tokens."""
        sources, samples = self._placed(np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64))
        of_rows: list[Parts] = [()] * self.batch
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            for row, parts in zip(chosen.tolist(), self._samples[source].parts(samples[chosen]), strict=True):
                of_rows[row] = parts
        return of_rows

    def holdout(self, indices: npt.ArrayLike) -> Arrays:
        """Return samples held out, the arrays each int64 of shape (num_indices, sequence), source by source.

        `indices`, shape (num_indices,), lie in 0 ... num_holdout_samples - 1. Raises `DataError` else.
        """
        chosen = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.num_holdout_samples)]
        if outside.size:
            raise DataError(
                f"holdout sample {outside[0]} does not exist: {self.num_holdout_samples} are held out; raise holdout"
            )
        ends = np.cumsum(self._held)
        sources = np.searchsorted(ends, chosen, side="right")
        sizes: Ids = np.array([order.num_samples for order in self._orders], dtype=np.int64)
        firsts: Ids = sizes - ends + np.asarray(self._held, dtype=np.int64)
        return self._gather(sources, chosen + firsts[sources])

    def _at(self, first: int, count: int) -> Arrays:
        assert first >= 0, f"position {first} is negative"
        return self._gather(*self._placed(np.arange(first, first + count, dtype=np.int64)))

    def _placed(self, positions: Ids) -> tuple[Ids, Ids]:
        """Return the source and its sample at each of the global `positions`, shape (n,)."""
        sources, indices = self._blend.place(positions)
        for source in np.unique(sources):
            chosen = sources == source
            indices[chosen] = self._orders[source].sample(indices[chosen])
        return sources, indices

    def _gather(self, sources: Ids, samples: Ids) -> Arrays:
        """Return the rows of `samples`, each of its source; both shape (n,)."""
        if len(self._samples) == 1:
            return self._arrays(self._samples[0].rows(samples))
        whole = tuple(np.empty((len(samples), self.sequence), dtype=np.int64) for _ in range(2 + self.has_positions))
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            for all_rows, rows in zip(whole, self._arrays(self._samples[source].rows(samples[chosen])), strict=True):
                all_rows[chosen] = rows
        return whole

    def _arrays(self, rows: Rows) -> Arrays:
        inputs, labels, positions = rows
        if not self.has_positions:
            return inputs, labels
        if positions is None:  # beside documents kept apart, a row of joined ones counts as one document
            positions = np.broadcast_to(np.arange(self.sequence), inputs.shape)
        return inputs, labels, positions


def _num_held(source: Source, num_samples: int, holdout: float) -> int:
    """Return how many samples of a source are held out. Raises `DataError` unless some are left."""
    if holdout >= 1 and holdout != int(holdout):
        raise DataError(f"holdout = {holdout} is neither a share below 1 nor a whole number of samples; round it")
    held = int(holdout) if holdout >= 1 else math.ceil(holdout * num_samples)
    if held >= num_samples:
        raise DataError(
            f"holdout = {holdout:g} leaves nothing to train on: {source.name or source.tokens.path} has {num_samples} "
            f"samples; hold out at most {num_samples - 1} or give more data"
        )
    return held
