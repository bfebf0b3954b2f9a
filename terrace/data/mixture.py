"""The source of each sample of a run: several weighted sources, blended evenly.

A weight is a share of the samples. Weights are exact: written as integers without a common divisor, c_0, c_1, ..., they
sum to the **period** M, and every M consecutive samples from a multiple of M hold exactly c_i of source i. Inside a
period each source keeps its pace: after n samples it has given more than n w_i - 1 and fewer than n w_i + 1, where w_i
= c_i / M. Such an order always exists, and earliest deadline first finds it: sample j of source i may not come before
index floor(j / w_i), else the source would be a whole sample ahead, nor after index ceil((j + 1) / w_i) - 1, else a
whole sample behind.

One period is computed once and kept as two arrays, so looking up a position costs O(1).

Source: Baruah, Cohen, Plaxton and Varvel 1996 (proportionate progress: the windows, and that they can always be met).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from terrace.base.errors import DataError

MAX_PERIOD = 100_000  # computed in a tenth of a second; five digits of a share are more than data decides

Ids = npt.NDArray[np.int64]


def parts_of(weights: Sequence[float]) -> tuple[int, ...]:
    """The weights as the smallest integers in the same proportion.

    Weights are taken as the decimals written by the user. Raises `DataError` for a weight that is not positive and
    finite, and for weights whose period is longer than `MAX_PERIOD`.
    """
    for weight in weights:
        if not 0 < weight < math.inf:
            raise DataError(f"a weight of {weight:g} in data.mixture must be a positive number; leave that source out")
    # The shortest decimal that gives the float is what the user wrote.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    # Fractions keep the weights exact, so the period is, too.
    common = math.lcm(*(each.denominator for each in exact))
    whole = [int(each * common) for each in exact]
    divisor = math.gcd(*whole)
    parts = tuple(each // divisor for each in whole)
    if sum(parts) > MAX_PERIOD:
        total = sum(weights)
        shares = ", ".join(f"{weight / total:.3f}" for weight in weights)
        raise DataError(
            f"the weights {', '.join(f'{weight:g}' for weight in weights)} of data.mixture repeat only after "
            f"{sum(parts)} samples, at most {MAX_PERIOD} are kept: write them with fewer digits, as {shares}"
        )
    return parts


class Blend:
    """The source of every position of a run, and how many samples that source gave before it."""

    def __init__(self, weights: Sequence[float]) -> None:
        self.parts = parts_of(weights)
        self._of_source = np.array(self.parts, dtype=np.int64)
        self._source, self._before = _period(self.parts)

    def place(self, positions: Ids) -> tuple[Ids, Ids]:
        """Source of each of the global `positions`, shape (n,), and the index of its sample within that source.

        Indices of a source count from 0 without gaps.
        """
        # Every period is alike, so a position needs only its place in one.
        periods, offsets = np.divmod(positions, len(self._source))
        sources = self._source[offsets]
        return sources, periods * self._of_source[sources] + self._before[offsets]

    def first_with(self, source: int, count: int) -> int:
        periods, rest = divmod(count - 1, self.parts[source])
        return periods * len(self._source) + int(np.flatnonzero(self._source == source)[rest]) + 1

    def counts(self, num_samples: int) -> list[int]:
        periods, rest = divmod(num_samples, len(self._source))
        inside = np.bincount(self._source[:rest], minlength=len(self.parts))
        return [periods * part + int(count) for part, count in zip(self.parts, inside, strict=True)]


def _period(parts: Sequence[int]) -> tuple[Ids, Ids]:
    period = sum(parts)
    source, before = np.empty(period, dtype=np.int64), np.empty(period, dtype=np.int64)
    waiting = [(0, index, 0) for index in range(len(parts))]  # (first place allowed, source, its sample)
    ready: list[tuple[int, int, int]] = []  # (last place allowed, source, its sample)
    for place in range(period):
        # Samples whose window has opened compete; the one with the earliest deadline is served.
        while waiting and waiting[0][0] <= place:
            _, index, sample = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-(sample + 1) * period // parts[index]) - 1, index, sample))
        last, index, sample = heapq.heappop(ready)
        assert last >= place, "the earliest deadline is always kept"
        source[place], before[place] = index, sample
        # The source's next sample waits until its window opens.
        if sample + 1 < parts[index]:
            heapq.heappush(waiting, ((sample + 1) * period // parts[index], index, sample + 1))
    return source, before
