"""Sizes of tiers for a number of ranks."""

from collections.abc import Sequence


def sizes_for(num_ranks: int, sizes: Sequence[int]) -> list[int]:
    """Sizes of tiers, innermost first, with `num_ranks` ranks together; `sizes` are those of a cluster.

    From the innermost tier outward each gets as many members as divide the ranks left, at most as many as it has; the
    outermost gets all that are left.
    """
    found, left = list[int](), num_ranks
    for size in sizes[:-1]:
        here = max(part for part in range(1, max(1, min(size, left)) + 1) if left % part == 0)
        found.append(here)
        left //= here
    return [*found, left]
