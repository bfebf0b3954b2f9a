"""Tier sizes for a number of ranks."""

from collections.abc import Sequence


def sizes_for(num_ranks: int, sizes: Sequence[int]) -> list[int]:
    """Tier sizes, innermost first, whose product is `num_ranks`; `sizes` are those of a cluster.

    From the innermost tier outward, each gets the largest divisor of the remaining ranks up to its size; the outermost
    gets the rest.
    """
    found, left = list[int](), num_ranks
    for size in sizes[:-1]:
        here = max(part for part in range(1, max(1, min(size, left)) + 1) if left % part == 0)
        found.append(here)
        left //= here
    return [*found, left]
