"""The least number at which a condition holds."""

import math
from collections.abc import Callable

_TOLERANCE = 1e-3  # of the number


def least(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The least number from `low` to `high` at which `holds`, to a thousandth; infinite where it does not at `high`.

    Where `holds` is true at a number, it must be at all greater ones.
    """
    if not holds(high):
        return math.inf
    if holds(low):
        return low
    while high / low > 1 + _TOLERANCE:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
