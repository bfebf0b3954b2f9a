"""What an optimizer shows of its state."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """Elements of a rank's slice whose parameters are of one group, and by kind their state: 1-D views."""

    group: str
    elements: slice  # of the slice that the optimizer owns
    values: Mapping[str, Tensor]
