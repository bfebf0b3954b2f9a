"""Terrace's attention for use inside a layer of another library, between its projections.

It uses the masks of `terrace.model.attention`; the context axis replaces `plans`.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.attention import PlannedAttention, attend
from terrace.model.attention_plans import AttentionPlans


class DeclaredAttention(PlannedAttention):
    """Attention of one layer without parameters: projected queries, keys and values to the outputs of the heads."""

    def __init__(self, window: int, is_grouped: bool) -> None:
        super().__init__()
        self.plans = AttentionPlans(window, is_grouped=is_grouped)
        self.window, self.is_running = window, False
        self._positions: Tensor | None = None

    @contextmanager
    def on(self, positions: Tensor | None) -> Iterator[None]:
        """Context in which the layer uses this module; `positions` (B, S) mark documents."""
        before = self.is_running, self._positions
        self.is_running, self._positions = True, positions
        try:
            yield
        finally:
            self.is_running, self._positions = before

    def forward(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Attention output (B, N, S, D) of query (B, N, S, D) over keys and values (B, K, S, D).

        Raises `ModelError` if `scale` is given and is not 1 / sqrt(D).
        """
        size = query.shape[3]
        if scale is not None and abs(scale * size**0.5 - 1) > 1e-6:
            raise ModelError(
                f"the layer scales its scores by {scale:.6g}, and declared attention by 1 / sqrt({size}): leave the "
                "declaration out"
            )
        return attend(query, key, value, self.plans.plan(self._positions, query))
