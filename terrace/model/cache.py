"""Keys and values of earlier passes, as a layer's attention asks for them.

Nothing else of a decoder knows of them. terrace.generation has the pages in which they are kept.

Shape legend: B rows, S tokens that pass, K key-value heads, N query heads, D head_dim.
"""

from typing import Protocol

from torch import Tensor

from terrace.model.attention import MaskPlan


class LayerCache(Protocol):
    """Keys and values that a layer keeps of the tokens before those that pass."""

    @property
    def continues(self) -> bool:
        """Whether the cache itself masks keys for the passing tokens, so that they need no mask plan."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (B, K, S, D) of the passing tokens; the attention output of query (B, N, S, D) over all
        that they see.
        """
        ...
