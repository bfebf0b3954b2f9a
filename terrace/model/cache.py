"""Interface of the key-value cache, used only by a layer's attention.

terrace.generation implements it with pages.

Shape legend: B rows, S new tokens, K key-value heads, N query heads, D head_dim.
"""

from typing import Protocol

from torch import Tensor

from terrace.model.attention import NO_SINKS, MaskPlan


class LayerCache(Protocol):
    """Cached keys and values of one layer."""

    @property
    def continues(self) -> bool:
        """Whether the cache does the masking itself, so that no mask plan is needed."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, sinks: Tensor = NO_SINKS) -> Tensor:
        """Store key and value (B, K, S, D) of the new tokens and return their attention output.

        Query and output are (B, N, S, D); attention includes the cached tokens and `sinks` (N).
        """
        ...
