"""Interfaces of what generation keeps of a layer: keys and values, or the state of a linear layer.

terrace.generation implements them, with pages, and with a slot for each sequence.

Shape legend: B rows, S new tokens, K key-value heads, N query heads, D head_dim; of a part of a step R spans of L
tokens, N value heads with states of (K, V), P taps and F features of its convolutions.
"""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from terrace.model.attention import NO_SINKS, MaskPlan


class LayerCache(Protocol):
    @property
    def continues(self) -> bool:
        """Whether the cache does the masking itself, so that no mask plan is needed."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, sinks: Tensor = NO_SINKS) -> Tensor:
        """Store key and value (B, K, S, D) of the new tokens and return their attention output.

        Query and output are (B, N, S, D); attention includes the cached tokens and `sinks` (N).
        """
        ...


class StatePart(Protocol):
    """Spans of a step that have equally many tokens, and are next to each other."""

    def cut(self, x: Tensor) -> Tensor:
        """The tokens (R, L, ...) of these spans, of x (1, T, ...)."""
        ...

    def load(self) -> tuple[Tensor, Tensor]:
        """What is before each span: the last inputs (R, P - 1, F) of the convolutions, and states (R, N, K, V)."""
        ...

    def store(self, tails: Tensor, states: Tensor) -> None:
        """Keep what is after each span, in the shapes of `load`."""
        ...


@runtime_checkable
class StateCache(Protocol):
    @property
    def parts(self) -> Sequence[StatePart]: ...
