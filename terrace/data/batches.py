"""The tokens of each rank at each step.

Shapes: batch = samples of a global step, micro_batch = samples of one micro-batch of one data rank, sequence = tokens
of a sample.

A sample is a row of `sequence` tokens, made from the documents of one source (terrace.data.samples). Sources contribute
samples at a steady rate by weight (terrace.data.mixture). Each source is shuffled by its own `SampleOrder` and so has
its own epochs; a small source with a large weight has short ones.

Step s takes the global positions s*batch ... (s+1)*batch - 1. Micro-batch m of data rank r holds the `micro_batch`
consecutive positions from (m*num_data_ranks + r)*micro_batch on. Together the ranks' micro-batches are the global
batch, whatever the world size, and any step can be made without the steps before it. Every rank has equally many, or,
where groups of data ranks have `shares`, micro-batch m is dealt to those that have more than m (`micros_of_rank`).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.data.documents import Documents, open_documents
from terrace.data.mixture import Blend
from terrace.data.order import SampleOrder
from terrace.data.packing import Packing, Tally, packed
from terrace.data.pairs import PairOrder, PairRows
from terrace.data.samples import Packed, Parts, Windows
from terrace.data.sources import Documented, TooLong
from terrace.data.text_rows import TextRows
from terrace.data.token_file import TokenFile

# Permuting a few positions costs little more than permuting one (terrace.data.order), so a rank's next steps are looked
# up together, up to this number of rows.
_ROWS_PLACED_AHEAD = 4096
_ROWS_FOUND_AT_ONCE = 1 << 20  # bounds the memory of `used`

Ids = npt.NDArray[np.int64]
Arrays = tuple[Ids, ...]  # inputs, labels and, where documents are kept apart, positions
Shares = tuple[int, ...]  # micro-batches of each rank of equal groups of data ranks; empty: all ranks have equally many


@dataclass(frozen=True, kw_only=True)
class Source:
    tokens: TokenFile
    name: str = ""
    weight: float = 1.0
    documents: Documented = "join"
    too_long: TooLong = "refuse"

    def packing(self, sequence: int, holdout: float = 0) -> Packing:
        """Packs whole documents into sequences. Computed on the first call, then kept in a file.

        If documents are split, held-out documents are packed separately; otherwise the last sequences serve as the
        hold-out.
        """
        assert self.documents == "whole", "only whole documents are packed"
        # Indexed data are not in the cache, but their starts are; the digest tells contents of one name apart.
        beside = self.tokens.starts.with_name(f"{self.tokens.starts.stem}-{self.tokens.digest[:8]}")
        return packed(self._opened(), sequence, self.too_long, beside, holdout if self.is_split else 0.0)

    @property
    def is_split(self) -> bool:
        """Whether a document longer than a sequence is split over several packed sequences."""
        return self.documents == "whole" and self.too_long == "split"

    def samples(self, sequence: int, holdout: float = 0) -> Windows | Packed | PairRows | TextRows:
        """The samples of this source. Raises `DataError` if it has none."""
        if self.documents == "pairs":
            return PairRows(self._opened(), sequence)
        if self.documents == "whole":
            return Packed(self._opened(), sequence, self.packing(sequence, holdout))
        return Windows(self._opened(), sequence, separate=self.documents == "separate")

    def _opened(self) -> Documents:
        return open_documents(self.tokens, self.name)

    def facts(self) -> dict[str, Any]:
        """Facts, stored in checkpoints, that decide which tokens of this source a step reads."""
        too_long = {"too_long": self.too_long} if self.documents == "whole" else {}
        return {"digest": self.tokens.digest, "weight": self.weight, "documents": self.documents, **too_long}


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    name: str
    num_samples: int  # that are trained on, in an epoch
    num_holdout_samples: int
    num_taken: int  # in all steps
    tally: Tally | None  # where whole documents are packed

    @property
    def epochs(self) -> float:
        return self.num_taken / self.num_samples


class _Placed(NamedTuple):
    key: tuple[int, ...]  # first step; data rank, their number, rows of a micro-batch; shares
    sources: Ids  # (steps, rows of the rank), as are the samples
    samples: Ids


class Batches:
    """Training batches of a token file or of weighted sources, and the held-out samples, which are never trained on.

    `holdout` is a share of each source's samples if below 1, else their number; the last samples are held out. If
    documents are split, as many whole documents are held out as fill that share or number. If text is cut into windows,
    the first held-out window shares one token with training, where it is the last label. Ids of every row are checked
    against `vocab_size`. Raises `DataError` for sizes below one, a source without a whole sample, and a holdout that
    leaves nothing to train on.
    """

    def __init__(
        self,
        sources: TokenFile | Sequence[Source],
        sequence: int,
        batch: int,
        seed: int,
        holdout: float = 0,
        vocab_size: int | None = None,
    ) -> None:
        for name, value, least in (("sequence", sequence, 1), ("batch", batch, 1), ("holdout", holdout, 0)):
            if value < least:
                raise DataError(f"{name} = {value} must be at least {least}; raise it")
        self.sources = (Source(tokens=sources),) if isinstance(sources, TokenFile) else tuple(sources)
        self.sequence = sequence
        self.batch = batch
        self._vocab_size = vocab_size
        self._holdout = holdout
        self._samples = [source.samples(sequence, holdout) for source in self.sources]
        self._held = [
            source.packing(sequence, holdout).tally.num_held
            if source.is_split
            else _num_held(source, samples.num_samples, holdout)
            for source, samples in zip(self.sources, self._samples, strict=True)
        ]
        # Held-out samples are the last ones of each source; the training order permutes only the samples before them.
        self._orders = [
            PairOrder(samples.num_samples, seed)
            if isinstance(samples, PairRows)
            else SampleOrder(samples.num_samples - held, seed, source)
            for source, (samples, held) in enumerate(zip(self._samples, self._held, strict=True))
        ]
        self._blend = Blend([source.weight for source in self.sources])
        # Rows have positions as soon as one source keeps documents apart.
        self.has_positions = any(samples.has_positions for samples in self._samples)
        self.num_samples = sum(order.num_samples for order in self._orders)
        self.num_holdout_samples = sum(self._held)
        self._ahead: _Placed | None = None

    def uses(self, num_steps: int) -> list[SourceUse]:
        # Counted, not iterated: the blend repeats after one period.
        taken = self._blend.counts(num_steps * self.batch)
        return [
            SourceUse(
                name=source.name or str(source.tokens.path),
                num_samples=order.num_samples,
                num_holdout_samples=held,
                num_taken=count,
                tally=source.packing(self.sequence, self._holdout).tally if source.documents == "whole" else None,
            )
            for source, order, held, count in zip(self.sources, self._orders, self._held, taken, strict=True)
        ]

    def steps_of(self, epochs: float) -> tuple[int, int]:
        """The fewest steps in which every source is passed `epochs` times, and the samples of the last one beyond."""
        exact = Fraction(repr(float(epochs)))  # as the user wrote it, so that 0.1 of 30 samples are 3
        needed = [math.ceil(exact * order.num_samples) for order in self._orders]
        num = max(self._blend.first_with(source, count) for source, count in enumerate(needed))
        steps = -(-num // self.batch)
        return steps, steps * self.batch - num

    def micro_batches(
        self, step: int, data_rank: int, num_data_ranks: int, micro_batch: int, shares: Shares = ()
    ) -> list[Arrays]:
        """The micro-batches of a data rank in `step`; each array is int64 of shape (micro_batch, sequence).

        Raises `DataError` unless batch is a multiple of num_data_ranks * micro_batch.
        """
        if not shares and (micro_batch < 1 or num_data_ranks < 1 or self.batch % (num_data_ranks * micro_batch)):
            raise DataError(
                f"batch = {self.batch} is not a multiple of num_data_ranks = {num_data_ranks} times "
                f"micro_batch = {micro_batch}; change one of them"
            )
        assert step >= 0, f"step {step}"
        assert 0 <= data_rank < num_data_ranks, f"data_rank {data_rank} of {num_data_ranks}"
        # All are read at once and then cut: a read costs as much as a thousand tokens.
        whole = self.gather(*self._placed_ahead(step, shares, data_rank, num_data_ranks, micro_batch))
        ends = range(micro_batch, len(whole[0]) + 1, micro_batch)
        return [tuple(array[end - micro_batch : end] for array in whole) for end in ends]

    def rows(self, step: int, rows: Ids) -> Arrays:
        """Rows `rows`, shape (n,), of the global batch of `step`: inputs, labels and, if `has_positions`, positions,
        each int64 of shape (n, sequence).
        """
        return self.gather(*self._placed(step * self.batch + rows))

    @property
    def pairs(self) -> PairRows | None:
        (rows, *_) = self._samples
        return rows if isinstance(rows, PairRows) else None

    def of_samples(self, samples: Ids) -> Arrays:
        """Gathers `samples`, shape (n,), of the only source; returns arrays as `rows` does."""
        return self.gather(np.zeros_like(samples), samples)

    def samples_of(self, step: int, data_rank: int, num_data_ranks: int, micro_batch: int, shares: Shares = ()) -> Ids:
        """Sample numbers of a data rank's rows in `step`, micro-batch after micro-batch, each within its source."""
        return self.places_of(step, data_rank, num_data_ranks, micro_batch, shares)[1]

    def places_of(
        self, step: int, data_rank: int, num_data_ranks: int, micro_batch: int, shares: Shares = ()
    ) -> tuple[Ids, Ids]:
        """Sources and samples of a data rank's rows in `step`, as `samples_of`."""
        return self._placed_ahead(step, shares, data_rank, num_data_ranks, micro_batch)

    def used(self, num_steps: int) -> tuple[Ids, Ids]:
        """Sources and samples of all rows of the first `num_steps` steps, each once, in ascending order."""
        seen = np.zeros((0, 2), dtype=np.int64)
        for first in range(0, num_steps * self.batch, _ROWS_FOUND_AT_ONCE):
            last = min(num_steps * self.batch, first + _ROWS_FOUND_AT_ONCE)
            placed = np.stack(self._placed(np.arange(first, last, dtype=np.int64)), axis=1)
            seen = np.unique(np.concatenate([seen, placed]), axis=0)
        return seen[:, 0], seen[:, 1]

    def parts(self, step: int) -> list[Parts]:
        """For every row of the global batch of `step`, the column ranges of its documents with labels. Reads no
        tokens.
        """
        return self.parts_of(*self._placed(np.arange(step * self.batch, (step + 1) * self.batch, dtype=np.int64)))

    def parts_of(self, sources: Ids, samples: Ids) -> list[Parts]:
        """Like `parts`, for given sources and samples, both of shape (n,)."""
        of_rows: list[Parts] = [()] * len(samples)
        for source in np.unique(sources):
            chosen = np.flatnonzero(sources == source)
            for row, parts in zip(chosen.tolist(), self._samples[source].parts(samples[chosen]), strict=True):
                of_rows[row] = parts
        return of_rows

    def holdout(self, indices: npt.ArrayLike) -> Arrays:
        """Held-out samples, source by source. The arrays are int64 of shape (num_indices, sequence).

        Raises `DataError` unless all `indices`, shape (num_indices,), lie in 0 ... num_holdout_samples - 1.
        """
        chosen = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.num_holdout_samples)]
        if outside.size:
            raise DataError(
                f"holdout sample {outside[0]} does not exist: {self.num_holdout_samples} are held out; raise holdout"
            )
        sources, samples = self.held()
        return self.gather(sources[chosen], samples[chosen])

    def held(self) -> tuple[Ids, Ids]:
        # Held-out samples are the last ones of each source.
        firsts = [order.num_samples for order in self._orders]
        found = [np.arange(first, first + held) for first, held in zip(firsts, self._held, strict=True)]
        return np.repeat(np.arange(len(found)), self._held), np.concatenate(found)

    def _placed_ahead(self, step: int, shares: Shares, *split: int) -> tuple[Ids, Ids]:
        # Source and sample of the rows of a data rank in `step`. A pure function: only its last result is kept.
        data_rank, num_data_ranks, micro_batch = split
        num_rows = self.batch // num_data_ranks
        num_steps = max(1, _ROWS_PLACED_AHEAD // num_rows)
        first = step - step % num_steps
        ahead = self._ahead
        key = (first, *split, *shares)
        if ahead is None or ahead.key != key:
            rows = rows_of_rank(self.batch, data_rank, num_data_ranks, micro_batch, shares)
            positions = np.arange(first, first + num_steps)[:, None] * self.batch + rows
            sources, samples = self._placed(positions.ravel())
            ahead = _Placed(key, sources.reshape(positions.shape), samples.reshape(positions.shape))
            self._ahead = ahead
        return ahead.sources[step - first], ahead.samples[step - first]

    def _placed(self, positions: Ids) -> tuple[Ids, Ids]:
        # A position gives a source and an index within it; the source's own order turns the index into a sample.
        sources, indices = self._blend.place(positions)
        for source in np.unique(sources):
            chosen = sources == source
            indices[chosen] = self._orders[source].sample(indices[chosen])
        return sources, indices

    def gather(self, sources: Ids, samples: Ids) -> Arrays:
        """Gathers rows by source and sample, both of shape (n,); returns arrays as `rows` does."""
        shape = len(samples), self.sequence
        inputs, labels = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
        positions = np.empty(shape, dtype=np.int64) if self.has_positions else None
        for row, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
            place = None if positions is None else positions[row]
            self._samples[source].fill(sample, inputs[row], labels[row], place)
        if self._vocab_size is not None:
            self._check_vocab(self._vocab_size, sources, samples, inputs, labels)
        return (inputs, labels) if positions is None else (inputs, labels, positions)

    def _check_vocab(self, vocab_size: int, sources: Ids, samples: Ids, inputs: Ids, labels: Ids) -> None:
        # An id without an embedding row would read out of bounds. Labels are inputs except for a row's last one, or
        # ignored, which is negative. A negative id becomes huge as an unsigned number.
        if not inputs.size or max(inputs.view(np.uint64).max(), labels.max()) < vocab_size:
            return
        largest = np.maximum(inputs.max(axis=1), labels.max(axis=1))
        row = int(np.flatnonzero((largest >= vocab_size) | (inputs.min(axis=1) < 0))[0])
        source = self.sources[sources[row]]
        found = int(inputs[row].min()) if int(inputs[row].min()) < 0 else int(largest[row])
        raise DataError(
            f"sample {samples[row]} of {source.name or source.tokens.path} has token id {found}, but the model's "
            f"vocab_size is {vocab_size}: {source.tokens.path} is damaged or belongs to another tokenizer; "
            "delete it if it is in the cache, and it will be made again"
        )


def rows_of_rank(batch: int, data_rank: int, num_data_ranks: int, micro_batch: int, shares: Shares = ()) -> Ids:
    """Rows of a global batch that belong to a data rank, micro-batch after micro-batch."""
    micros = micros_of_rank(batch // micro_batch, data_rank, num_data_ranks, shares)
    return (micros[:, None] * micro_batch + np.arange(micro_batch)).ravel()


def micros_of_rank(num_micros: int, data_rank: int, num_data_ranks: int, shares: Shares = ()) -> Ids:
    """Which of a global batch's `num_micros` micro-batches belong to a data rank.

    Micro-batches are dealt to data ranks in turn, so the global batch is the same for any number of ranks. A rank of a
    group with share s takes part in the first s rounds.
    """
    if not shares:
        return np.arange(data_rank, num_micros, num_data_ranks, dtype=np.int64)
    ranks, of_groups = num_data_ranks // len(shares), np.array(shares, dtype=np.int64)
    group, place = divmod(data_rank, ranks)
    rounds = np.arange(shares[group], dtype=np.int64)
    before = np.minimum(of_groups[:, None], rounds).sum(axis=0)  # of one rank of every group, in the rounds before
    earlier = (of_groups[:group, None] > rounds).sum(axis=0)  # groups that take part and are dealt to first
    found: Ids = (before + earlier) * ranks + place
    return found


def _num_held(source: Source, num_samples: int, holdout: float) -> int:
    if holdout >= 1 and holdout != int(holdout):
        raise DataError(f"holdout = {holdout} is neither a share below 1 nor a whole number of samples; round it")
    # Rounded up, so that a small share still holds out one sample.
    held = int(holdout) if holdout >= 1 else math.ceil(holdout * num_samples)
    if held >= num_samples:
        raise DataError(
            f"holdout = {holdout:g} leaves nothing to train on: {source.name or source.tokens.path} has {num_samples} "
            f"samples; {f'hold out at most {num_samples - 1}' if num_samples > 1 else 'hold out 0'} or give more data"
        )
    return held
