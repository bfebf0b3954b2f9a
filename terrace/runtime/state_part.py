"""A part of an optimizer's state as checkpoints see it."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from terrace.runtime.states import KINDS


@dataclass(frozen=True, kw_only=True)
class StatePart:
    """State of some elements of a rank's slice, from parameters of one group: 1-D views by kind."""

    group: str
    elements: slice  # of the slice that the optimizer owns
    values: Mapping[str, Tensor]


def whole_part(group: str, *states: Tensor) -> StatePart:
    """A part with all elements, given the group's states in the order of `KINDS`."""
    values = dict(zip(KINDS[group], states, strict=True))
    return StatePart(group=group, elements=slice(0, states[0].numel()), values=values)
