"""Attention in one process in which rows are rounded where they would go to another context rank.

It takes a micro-batch of one row, over u Ulysses ranks of each of at most two ring ranks. A row is one token's heads of
one part.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from terrace.comm import codecs
from terrace.model.attention import NO_SINKS
from terrace.model.layers import Attention
from terrace.plan.wire import parse_format


class _Moved(torch.autograd.Function):
    """Rows of x (1, H, S, D), coded and decoded in both directions for heads and tokens in `mask` (parts, S)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, name: str) -> Tensor:
        ctx.mask, ctx.name = mask, name
        return _rounded(x, mask, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _rounded(grads[0], ctx.mask, ctx.name), None, None


def _rounded(x: Tensor, mask: Tensor, name: str) -> Tensor:
    if not name:
        return x.clone()
    parts, (_, heads, tokens, size), wire = len(mask), x.shape, parse_format(name)
    rows = x.view(parts, heads // parts, tokens, size).transpose(1, 2).reshape(parts * tokens, -1)
    codes = torch.empty(len(rows), wire.message_bytes(rows.shape[1]), dtype=torch.uint8)
    decoded = torch.empty_like(rows)
    codecs.encode(rows.contiguous(), wire, codes)
    codecs.decode(codes, wire, decoded)
    rows = torch.where(mask.reshape(-1, 1), decoded, rows)
    return rows.view(parts, tokens, heads // parts, size).transpose(1, 2).reshape(x.shape)


class CodedPlans:
    """Stands in for the mask plans of attention modules; `places` and `parts` (S) say which rank holds a token.

    `dealt` is the format between Ulysses ranks, `ring` the one between ring ranks; "" for none.
    """

    def __init__(self, places: Tensor, parts: Tensor, num_parts: int, *, dealt: str, ring: str) -> None:
        self._places, self._dealt, self._ring = places, dealt, ring
        # Of each part's heads, the tokens that another part holds.
        self._away = torch.arange(num_parts)[:, None] != parts
        self._all = torch.ones_like(self._away)

    def plan(self, positions: Tensor | None, query: Tensor) -> "CodedPlans":
        """This object, for any micro-batch."""
        return self

    def attend(self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor = NO_SINKS) -> Tensor:
        """Attention output (1, N, S, D) of a query of that shape over keys and values (1, K, S, D)."""
        query, key, value = (self._moved(x, self._away, self._dealt) for x in (query, key, value))
        others = [self._moved(x, self._all, self._ring) for x in (key, value)]
        shared, tokens = query.shape[1] // key.shape[1], query.shape[2]
        key, value, key_there, value_there = (x.repeat_interleave(shared, 1) for x in (key, value, *others))
        here = self._places[:, None] == self._places
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        scores = torch.where(here, query @ key.mT, query @ key_there.mT) / math.sqrt(query.shape[3])
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        return self._moved((weights * here) @ value + (weights * ~here) @ value_there, self._away, self._dealt)

    @staticmethod
    def _moved(x: Tensor, mask: Tensor, name: str) -> Tensor:
        found: Tensor = _Moved.apply(x, mask, name)  # type: ignore[no-untyped-call]
        return found

    def put_into(self, blocks: Sequence[nn.Module]) -> None:
        """Replace the plans of all attention modules."""
        for module in (module for block in blocks for module in block.modules()):
            if isinstance(module, Attention):
                module.plans = self
