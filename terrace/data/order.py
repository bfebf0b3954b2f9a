"""The order of samples: a pseudorandom permutation per epoch, computed, never stored.

Position p of the run lies in epoch p // num_samples, and the epoch's permutation maps p % num_samples to a sample. The
permutation is a Feistel network with cycle walking:

- Write n = num_samples and 2^b for the least power of two that is at least n. A value below 2^b is split
  into a high and a low part of b - b//2 and b//2 bits. Round i replaces one part, alternately, by
  `part ^ (mix(other ^ key[i]) & mask)`. The other part is untouched, so each round can be undone, and the
  rounds together permute 0 ... 2^b - 1, whatever `mix` is.
- A result that is not below n is encrypted again until it is. Following a cycle of a permutation to its
  next member below n is a permutation of 0 ... n - 1, and as n > 2^(b-1) fewer than two
  encryptions are needed on average.

Keys come from a hash of (seed, epoch, source). A position costs O(1) and no state is kept between calls, so a run can
resume at any step, and the order does not depend on the number of ranks. The shuffle serves statistics, not secrecy.

Sources: Luby and Rackoff 1988 (Feistel permutations), Black and Rogaway 2002 (cycle walking), the 64-bit finaliser of
MurmurHash3 (constants of `_mix`).
"""

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError

# Eight keys fill one 64-byte hash. In theory four rounds suffice for large halves. With halves of one or two bits,
# eight rounds make each sample equally likely at each position (tested), but not each whole order: the frequencies of
# the 120 orders of five samples vary by about an eighth. That few samples do not matter.
_NUM_ROUNDS = 8


@dataclass(frozen=True)
class SampleOrder:
    """The sample at every position of a run over `num_samples` samples, whatever the world size.

    Each source of a mixture, numbered by `source`, has its own order; otherwise sources of equal size would always be
    paired sample by sample. Raises `DataError` if there is no sample.
    """

    num_samples: int
    seed: int
    source: int = 0

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise DataError(f"num_samples = {self.num_samples} must be at least 1; give more data")

    def sample(self, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The sample, in 0 ... num_samples - 1, at each of the global `positions`.

        `positions` has any shape, int64 and at least 0; the result has the same shape. Each epoch contains every sample
        exactly once.
        """
        positions = np.asarray(positions, dtype=np.int64)
        assert positions.size == 0 or positions.min() >= 0, "a position is negative"
        epochs, offsets = np.divmod(positions, self.num_samples)
        samples = np.empty_like(offsets)
        # A batch may cross the end of an epoch, and each epoch has its own keys.
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            samples[chosen] = self._permute(offsets[chosen], int(epoch))
        return samples

    def _permute(self, offsets: npt.NDArray[np.int64], epoch: int) -> npt.NDArray[np.int64]:
        name = f"{self.seed}/{epoch}/{self.source}" if self.source else f"{self.seed}/{epoch}"
        digest = hashlib.blake2b(name.encode(), digest_size=8 * _NUM_ROUNDS).digest()
        keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
        num_bits = (self.num_samples - 1).bit_length()
        values = _encrypt(offsets.astype(np.uint64), keys, num_bits)
        outside = np.flatnonzero(values >= self.num_samples)
        # Cycle walking: values outside are encrypted again until they fall inside.
        while outside.size:
            walked = _encrypt(values[outside], keys, num_bits)
            values[outside] = walked
            outside = outside[walked >= self.num_samples]
        return values.astype(np.int64)


def _encrypt(values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], num_bits: int) -> npt.NDArray[np.uint64]:
    # All operands stay uint64: Python ints could change the dtype.
    low_bits = np.uint64(num_bits // 2)
    low_mask = np.uint64((1 << (num_bits // 2)) - 1)
    high_mask = np.uint64((1 << (num_bits - num_bits // 2)) - 1)
    high, low = values >> low_bits, values & low_mask
    for index, key in enumerate(keys):
        if index % 2 == 0:
            high = high ^ (_mix(low ^ key) & high_mask)
        else:
            low = low ^ (_mix(high ^ key) & low_mask)
    return (high << low_bits) | low


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Spreads every input bit over the 64 output bits. Products wrap modulo 2^64 on purpose."""
    values = values ^ (values >> np.uint64(33))
    values *= np.uint64(0xFF51AFD7ED558CCD)
    values ^= values >> np.uint64(33)
    values *= np.uint64(0xC4CEB9FE1A85EC53)
    values ^= values >> np.uint64(33)
    return values
