"""Attention of a turn's tokens to the keys and values of their texts, which lie in pages.

Tokens of several texts pass a layer end to end, (1, T), without padding: one of each text that writes, several of one
that is read. A token attends to the tokens of its own text up to itself, or to the last ones under a sliding window.

Shape legend: T tokens of a turn, N query heads, K key-value heads, D head_dim, L places that a span reads.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.generation.pages import PagePool, Span
from terrace.model.attention import MaskPlan, additive_mask, attend


@dataclass
class Passing:
    """The spans of a turn with the tokens of each and the masks that all layers share."""

    spans: Sequence[Span]
    masks: list[Tensor | None]  # (tokens, L), where a span needs more than causality

    @staticmethod
    def of(spans: Sequence[Span], window: int, device: torch.device, dtype: torch.dtype) -> "Passing":
        return Passing(spans, [_mask(span, window, device, dtype) for span in spans])


class PagedLayer:
    """What a layer attends to, in place of the tokens that pass alone: see `terrace.model.cache.LayerCache`."""

    continues = True  # the masks of a turn are made here

    def __init__(self, pool: PagePool, layer: int) -> None:
        self._pool, self._layer = pool, layer
        self.passing = Passing((), [])

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (1, K, T, D) of the turn's tokens; the attention output of query (1, N, T, D)."""
        self._pool.store(self._layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        out = torch.empty_like(query.transpose(1, 2))  # (1, T, N, D), as the next product reads it
        begin = 0
        for index, (span, mask) in enumerate(zip(self.passing.spans, self.passing.masks, strict=True)):
            end = begin + span.end - span.first
            if span.first == span.begin and end > begin + 1:
                # Nothing came before: the tokens themselves are all keys.
                keys, values = key[:, :, begin:end], value[:, :, begin:end]
            else:
                keys, values = (part.unsqueeze(0) for part in self._pool.view(self._layer, index))
            if end == begin + 1:
                # Several heads with the same keys are as several queries of one head.
                queries = query[:, :, begin].view(1, keys.shape[1], -1, keys.shape[3])  # (1, K, N / K, D)
                out[:, begin] = F.scaled_dot_product_attention(queries, keys, values).flatten(1, 2)
            else:
                out[:, begin:end] = attend(query[:, :, begin:end], keys, values, mask).transpose(1, 2)
            begin = end
        return out.transpose(1, 2)


def _mask(span: Span, window: int, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    num_tokens = span.end - span.first
    is_plain = span.first == span.begin and not 0 < window < num_tokens
    # One token sees all that its span reads.
    if num_tokens == 1 or is_plain:
        return None
    queries, keys = (torch.arange(first, span.end, device=device) for first in (span.first, span.begin))
    return additive_mask(torch.zeros_like(queries), queries, keys, window, dtype)
