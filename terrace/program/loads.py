"""Expert load in a step, and its statistics.

With n_i tokens on expert i of a layer, and E experts:

    busiest_expert   max n / mean n                         of the worst layer; 1 is even
    busiest_rank     the same for ranks with different experts, if there are several
    max_vio          max n / mean n - 1                     mean over layers (MaxVio, 2408.15664, equation 4)
    entropy          - sum p_i ln p_i / ln E, p = n / sum n   mean over layers; 1 is even
    idle             number of experts without a token, over all layers
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True)
class Loads:
    """Token counts per expert, one row per mixture layer; experts are divided evenly among `num_ranks` ranks."""

    layers: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    num_ranks: int = 1

    @cached_property
    def figures(self) -> dict[str, float]:
        """The statistics by name; empty for a step without counted tokens."""
        rows = [row for row in self.counts if sum(row)]
        if not rows:
            return {}
        busiest = [_over_mean(row) for row in rows]
        found = {"busiest_expert": max(busiest)}
        if self.num_ranks > 1:
            found["busiest_rank"] = max(_over_mean(_of_ranks(row, self.num_ranks)) for row in rows)
        found["max_vio"] = sum(busiest) / len(rows) - 1
        found["entropy"] = sum(map(_entropy, rows)) / len(rows)
        found["idle"] = sum(row.count(0) for row in self.counts)
        return found


def _over_mean(row: Sequence[int]) -> float:
    return max(row) * len(row) / sum(row)


def _of_ranks(row: Sequence[int], num_ranks: int) -> list[int]:
    size = len(row) // num_ranks
    return [sum(row[first : first + size]) for first in range(0, len(row), size)]


def _entropy(row: Sequence[int]) -> float:
    total = sum(row)
    if len(row) == 1:
        return 1.0
    return -sum(n / total * math.log(n / total) for n in row if n) / math.log(len(row))
