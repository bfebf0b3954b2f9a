"""A part of an optimizer's state, as checkpoints see it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """State of some elements of a rank's slice, all of parameters of one group: 1-D views by kind."""

    group: str
    elements: slice  # of the slice that the optimizer owns
    values: Mapping[str, Tensor]
