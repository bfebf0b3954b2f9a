"""Attention of one engine step over paged keys and values.

The tokens of all sequences are packed into one row (1, T), without padding. Attention is causal within each sequence,
optionally with a sliding window. The spans of a step are ordered as follows:

- first prefill chunks, without cached keys: packed causal attention, as for the documents of a training row;
- later prefill chunks: each attends to the cached keys of its span, with a mask;
- decoding sequences, one token each. Query heads that share a key-value head are treated as several queries of that
  head. Short sequences of similar lengths are gathered and attend in one padded, masked call, because launching a
  kernel costs more than copying their keys. Each long sequence gets a call of its own.

Shape legend: T tokens of a step, B sequences in one decode call, N query heads, K key-value heads, D head_dim,
L positions read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.generation.pages import PagePool, Span, slots_of
from terrace.model.attention import NO_SINKS, Capped, MaskPlan, additive_mask, plain_products
from terrace.model.attention_plans import AttentionPlans, Queries
from terrace.model.sinks import attend

# Largest number of key elements per layer of a sequence that joins a batched decode call. One call costs about 20 us of
# overhead on an AVX-512 core, enough time to copy this many elements.
_SHORT = 2**15
_SIMILAR = 0.75  # shortest length in a batched call, relative to the longest; a guess
_ALIKE = 16  # positions; sequences up to this length are always batched


def order(spans: Sequence[Span]) -> list[int]:
    """Indices of `spans` in the order that `Passing` requires."""
    return sorted(range(len(spans)), key=lambda index: _kind(spans[index]))


@dataclass(frozen=True)
class _Together:
    """A batched decode call: indices (B) of its tokens in the step, and pool slots (B L) of its keys."""

    rows: Tensor
    slots: Tensor
    mask: Tensor | None  # (B, 1, 1, L)


class Passing:
    """Attention plan of one step for all layers with the window and soft cap of `plans`.

    Each span covers the keys within the widest window of all layers. `key_size` is K D; `plans` makes the mask plan of
    the first prefill chunks.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        plans: AttentionPlans,
        page_tokens: int,
        key_size: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        window = self.window = plans.window
        self.cap = plans.cap
        kinds = [_kind(span) for span in spans]
        num_fresh, num_read = kinds.count(0), kinds.count(1)
        assert kinds == sorted(kinds), "spans must stand as terrace.generation.attention.order says"
        self.num_fresh = sum(span.end for span in spans[:num_fresh])  # tokens
        self.plan: MaskPlan = None
        if num_fresh:
            positions = torch.cat([torch.arange(span.end) for span in spans[:num_fresh]])[None]
            self.plan = plans.build(positions, Queries(1, self.num_fresh, head_dim, device, dtype))
        begin = self.num_fresh
        self.parts: list[tuple[int, int, int, Tensor]] = []  # index of the span, first and last token + 1, mask
        for index in range(num_fresh, num_fresh + num_read):
            end = begin + spans[index].end - spans[index].first
            self.parts.append((index, begin, end, _mask(spans[index], window, device, dtype)))
            begin = end
        shift = begin - num_fresh - num_read  # token index = span index + shift, for decoding spans
        writing = range(num_fresh + num_read, len(spans))
        # A decoding sequence attends only to its last `window` keys.
        spans = [replace(span, begin=max(span.begin, span.end - window)) if window else span for span in spans]
        short = [index for index in writing if _length(spans[index]) * key_size <= _SHORT]
        groups = [group for group in _similar(spans, short) if len(group) > 1]
        together = {index for group in groups for index in group}
        self.alone = [(index, index + shift) for index in writing if index not in together]
        self.rows_alone = torch.tensor([row for _, row in self.alone], device=device)
        self.together = [_together(spans, group, shift, page_tokens, device, dtype) for group in groups]


class PagedLayer:
    """The paged `terrace.model.cache.LayerCache` of one layer."""

    continues = True  # the masks of a step are made here
    passing: Passing

    def __init__(self, pool: PagePool, layer: int, window: int) -> None:
        self._pool, self._layer, self.window = pool, layer, window

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan, sinks: Tensor = NO_SINKS) -> Tensor:
        """Store key and value (1, K, T, D) of the step's tokens and return the attention output for `query`.

        Query and output are (1, N, T, D), `sinks` (N).
        """
        pool, layer, passing = self._pool, self._layer, self.passing
        queries = query.transpose(1, 2)  # (1, T, N, D), as it lies in memory
        # With latent attention one tensor is both key and value, and is stored once.
        pool.store(layer, *(each[0].transpose(0, 1) for each in ((key,) if value is key else (key, value))))
        out = torch.empty_like(queries)
        if fresh := passing.num_fresh:
            own_keys, own_values = key[:, :, :fresh], value[:, :, :fresh]
            out[:, :fresh] = attend(query[:, :, :fresh], own_keys, own_values, passing.plan, sinks).transpose(1, 2)
        for index, begin, end, mask in passing.parts:
            keys, values = _both(pool.view(layer, index))
            own_plan = Capped(mask, passing.cap) if passing.cap else mask
            mixed = attend(query[:, :, begin:end], keys.unsqueeze(0), values.unsqueeze(0), own_plan, sinks)
            out[:, begin:end] = mixed.transpose(1, 2)
        heads = key.shape[1], query.shape[1] // key.shape[1], key.shape[3]  # K, N / K, D
        for group in passing.together:
            num = len(group.rows)
            keys, values = (
                part.view(num, -1, heads[0], heads[2]).transpose(1, 2)
                for part in _both(pool.gather(layer, group.slots))
            )  # (B, K, L, D)
            grouped = queries[0].index_select(0, group.rows).view(num, *heads)
            mixed = _all_seen(grouped, keys, values, group.mask, passing.cap, sinks)
            out[0].index_copy_(0, group.rows, mixed.flatten(1, 2))
        if passing.alone:
            rows = torch.split(queries.reshape(-1, *heads), 1)  # (1, K, N / K, D) each
            mixed_rows = []
            for index, row in passing.alone:
                keys, values = (part[:, -self.window or None :] for part in _both(pool.view(layer, index)))
                # Four dims: with three, torch takes its slow path on a CPU.
                own = keys.unsqueeze(0), values.unsqueeze(0)
                mixed_rows.append(_all_seen(rows[row], *own, None, passing.cap, sinks))
            out[0].index_copy_(0, passing.rows_alone, torch.cat(mixed_rows).flatten(1, 2))
        return out.transpose(1, 2)


def _both(stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return stored[0], stored[-1]


def _all_seen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float, sinks: Tensor) -> Tensor:
    # Non-causal attention under an optional mask; query heads (B, K, N / K, D) stand as queries of their keys' head.
    if not cap and not len(sinks):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    if mask is None:
        mask = query.new_zeros(1, key.shape[2])
    # One query of each head, since sinks are counted by head.
    return plain_products(query.flatten(1, 2).unsqueeze(2), key, value, mask, cap, sinks).view_as(query)


def _kind(span: Span) -> int:
    # A prompt of one token could count as prefill or decode; as decode it is cheaper.
    if span.end - span.first == 1:
        return 2
    return 0 if span.first == 0 else 1


def _length(span: Span) -> int:
    return span.end - span.begin


def _mask(span: Span, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    queries, keys = (torch.arange(first, span.end, device=device) for first in (span.first, span.begin))
    return additive_mask(torch.zeros_like(queries), queries, keys, window, dtype)


def _similar(spans: Sequence[Span], indices: Sequence[int]) -> list[list[int]]:
    """Group the spans `indices` by similar length, longest first."""
    groups: list[list[int]] = []
    least = float("inf")
    for index in sorted(indices, key=lambda index: (-_length(spans[index]), index)):
        if _length(spans[index]) < least:
            groups.append([])
            longest = _length(spans[index])
            least = 1 if longest <= _ALIKE else _SIMILAR * longest
        groups[-1].append(index)
    return groups


def _together(
    spans: Sequence[Span], group: Sequence[int], shift: int, page_tokens: int, device: torch.device, dtype: torch.dtype
) -> _Together:
    lengths = [_length(spans[index]) for index in group]
    longest = max(lengths)
    slots: list[int] = []
    for index, length in zip(group, lengths, strict=True):
        span = spans[index]
        own = slots_of(span.pages, span.begin, span.end, page_tokens)
        # Padding is masked, but must point at finite values: 0 times inf would be nan.
        slots += own + own[-1:] * (longest - length)
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None].to(device)
    rows = torch.tensor([index + shift for index in group], device=device)
    return _Together(rows, torch.tensor(slots, device=device), mask)
