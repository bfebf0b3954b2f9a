"""Which tokens each rank sees at each step.

Shapes: batch = samples of a global step, micro_batch = samples of one micro-batch of one data rank,
sequence = tokens of a sample.

Sample i is the window of tokens i*sequence ... (i+1)*sequence, both included: its first `sequence` are
the input, its last `sequence` the labels, so that every token but the first of the file is a label of
exactly one window. A tail shorter than a window is not used. Windows run across document ends, which the
end-of-text token marks.

Step s takes the global positions s*batch ... (s+1)*batch - 1 of the `SampleOrder`. Micro-batch m of data
rank r holds, of these, `micro_batch` in a row from (m*num_data_ranks + r)*micro_batch. So the micro-batches
of all ranks together are the global batch, whatever the world size, and any step can be had at once.
"""

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError
from terrace.train.data.order import SampleOrder
from terrace.train.data.tokens import TokenFile

Ids = npt.NDArray[np.int64]


class Batches:
    """Training batches of a token file, and its last `holdout_samples` windows, never trained on.

    The first holdout window shares one token with training: it is the last label there, only an input here.
    An epoch's last batch goes on into the next epoch. Raises `DataError` for sizes below one, data
    shorter than one window, and a holdout that leaves nothing to train on.
    """

    def __init__(self, tokens: TokenFile, sequence: int, batch: int, seed: int, holdout_samples: int = 0) -> None:
        for name, value, least in (
            ("sequence", sequence, 1),
            ("batch", batch, 1),
            ("holdout_samples", holdout_samples, 0),
        ):
            if value < least:
                raise DataError(f"{name} = {value} must be at least {least}; raise it")
        if tokens.num_tokens < sequence + 1:
            raise DataError(
                f"{tokens.path} has {tokens.num_tokens} tokens, but one sample of sequence {sequence} takes "
                f"{sequence + 1}; give more data or set sequence to at most {max(1, tokens.num_tokens - 1)}"
            )
        num_windows = (tokens.num_tokens - 1) // sequence
        if holdout_samples >= num_windows:
            raise DataError(
                f"holdout_samples = {holdout_samples} leaves nothing to train on: {tokens.path} has "
                f"{num_windows} samples of sequence {sequence}; hold out at most {num_windows - 1} "
                "or give more data"
            )
        self.tokens = tokens
        self.sequence = sequence
        self.batch = batch
        self.num_samples = num_windows - holdout_samples
        self.num_holdout_samples = holdout_samples
        self._order = SampleOrder(self.num_samples, seed)
        # A plain view: indexing a memmap object costs Python time for its subclass on every call.
        ids = np.asarray(tokens.open())
        # (num_windows, sequence + 1), overlapping by one token; no copy
        self._windows = np.lib.stride_tricks.sliding_window_view(ids, sequence + 1)[::sequence]

    def global_batch(self, step: int) -> tuple[Ids, Ids]:
        """Return the inputs and labels of step `step`, each int64 of shape (batch, sequence)."""
        return self._at(step * self.batch, self.batch)

    def micro_batch(
        self, step: int, micro: int, data_rank: int, num_data_ranks: int, micro_batch: int
    ) -> tuple[Ids, Ids]:
        """Return the inputs and labels of one micro-batch, each int64 of shape (micro_batch, sequence).

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

    def holdout(self, indices: npt.ArrayLike) -> tuple[Ids, Ids]:
        """Return the inputs and labels of held-out windows, each int64 of shape (num_indices, sequence).

        `indices`, shape (num_indices,), lie in 0 ... num_holdout_samples - 1. Raises `DataError` else.
        """
        chosen = np.atleast_1d(np.asarray(indices, dtype=np.int64))
        outside = chosen[(chosen < 0) | (chosen >= self.num_holdout_samples)]
        if outside.size:
            raise DataError(
                f"holdout sample {outside[0]} does not exist: holdout_samples is {self.num_holdout_samples}; raise it"
            )
        return self._gather(chosen + self.num_samples)

    def _at(self, first: int, count: int) -> tuple[Ids, Ids]:
        assert first >= 0, f"position {first} is negative"
        return self._gather(self._order.sample(np.arange(first, first + count, dtype=np.int64)))

    def _gather(self, samples: Ids) -> tuple[Ids, Ids]:
        rows = self._windows[samples]  # (n, sequence + 1), a copy in the stored dtype
        return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
