"""Attention of a turn's tokens to the keys and values of their texts, which lie in pages.

Tokens of several texts pass a layer end to end, (1, T), without padding. A token attends to the tokens of its own text
up to itself, or to the last ones under a sliding window. The spans of a turn stand in this order:

- beginnings of texts, to which nothing came before: the tokens themselves are all keys, as of the documents of a row;
- parts of texts that are read already: each attends to the keys of its span, under a mask;
- texts that write, a token each. The query heads that share keys are as several queries of one head. Short ones of
  similar lengths attend together, where the call of a kernel takes longer than copying their keys: those beyond a
  text's end are masked. Each long one attends by itself.

Shape legend: T tokens of a turn, B texts that attend together, N query heads, K key-value heads, D head_dim, L places.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from terrace.generation.pages import PagePool, Span, places_of
from terrace.model.attention import Capped, MaskPlan, additive_mask, attend, document_begins, plain_products
from terrace.model.attention_kernel import AttentionKernel
from terrace.model.attention_plans import make_plan

# Elements of a text's keys in a layer, up to which it attends together with others. On one AVX-512 core a call for one
# text takes some 20 us before it reads keys, in which as many elements are copied.
_SHORT = 2**15
_SIMILAR = 0.75  # of the longest of those that attend together; a guess
_ALIKE = 16  # places, up to which lengths make no difference


def order(spans: Sequence[Span]) -> list[int]:
    """Indices of spans, in the order in which they must pass."""
    return sorted(range(len(spans)), key=lambda index: _kind(spans[index]))


@dataclass(frozen=True)
class _Together:
    """Texts that write and attend together: their rows (B) among the tokens, the places (B L) of their keys."""

    rows: Tensor
    places: Tensor
    mask: Tensor | None  # (B, 1, 1, L)


class Passing:
    """How the spans of a turn attend, in all layers with this `window` (0: none); a `cap` of scores of 0 is none.

    Spans hold the keys within the widest window of all layers. `key_size` is K D; `kernel` serves the beginnings of
    texts.
    """

    def __init__(
        self,
        spans: Sequence[Span],
        *,
        window: int,
        page_tokens: int,
        key_size: int,
        kernel: AttentionKernel,
        device: torch.device,
        dtype: torch.dtype,
        cap: float = 0.0,
    ) -> None:
        self.window, self.cap = window, cap
        kinds = [_kind(span) for span in spans]
        num_fresh, num_read = kinds.count(0), kinds.count(1)
        assert kinds == sorted(kinds), "spans must stand as terrace.generation.attention.order says"
        self.num_fresh = sum(span.end for span in spans[:num_fresh])  # tokens
        self.plan = _plan(spans[:num_fresh], kernel, window, device, dtype, cap)
        begin = self.num_fresh
        self.parts: list[tuple[int, int, int, Tensor]] = []  # index of the span, first and last token + 1, mask
        for index in range(num_fresh, num_fresh + num_read):
            end = begin + spans[index].end - spans[index].first
            self.parts.append((index, begin, end, _mask(spans[index], window, device, dtype)))
            begin = end
        shift = begin - num_fresh - num_read  # from the index of a span that writes to its token
        writing = range(num_fresh + num_read, len(spans))
        # A text that writes one token attends to its last `window` keys alone.
        spans = [replace(span, begin=max(span.begin, span.end - window)) if window else span for span in spans]
        short = [index for index in writing if _length(spans[index]) * key_size <= _SHORT]
        groups = [group for group in _similar(spans, short) if len(group) > 1]
        together = {index for group in groups for index in group}
        self.alone = [(index, index + shift) for index in writing if index not in together]
        self.rows_alone = torch.tensor([row for _, row in self.alone], device=device)
        self.together = [_together(spans, group, shift, page_tokens, device, dtype) for group in groups]


class PagedLayer:
    """Keys and values of a layer beside those of the passing tokens: see `terrace.model.cache.LayerCache`."""

    continues = True  # the masks of a turn are made here
    passing: Passing

    def __init__(self, pool: PagePool, layer: int, window: int) -> None:
        self._pool, self._layer, self.window = pool, layer, window

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (1, K, T, D) of the turn's tokens; the attention output of query (1, N, T, D)."""
        pool, layer, passing = self._pool, self._layer, self.passing
        queries = query.transpose(1, 2)  # (1, T, N, D), as it lies in memory
        # A latent is key and value at once, and stored once.
        pool.store(layer, *(each[0].transpose(0, 1) for each in ((key,) if value is key else (key, value))))
        out = torch.empty_like(queries)
        if fresh := passing.num_fresh:
            own_keys, own_values = key[:, :, :fresh], value[:, :, :fresh]
            out[:, :fresh] = attend(query[:, :, :fresh], own_keys, own_values, passing.plan).transpose(1, 2)
        for index, begin, end, mask in passing.parts:
            keys, values = _both(pool.view(layer, index))
            own_plan = Capped(mask, passing.cap) if passing.cap else mask
            mixed = attend(query[:, :, begin:end], keys.unsqueeze(0), values.unsqueeze(0), own_plan)
            out[:, begin:end] = mixed.transpose(1, 2)
        heads = key.shape[1], query.shape[1] // key.shape[1], key.shape[3]  # K, N / K, D
        for group in passing.together:
            num = len(group.rows)
            keys, values = (
                part.view(num, -1, heads[0], heads[2]).transpose(1, 2)
                for part in _both(pool.gather(layer, group.places))
            )  # (B, K, L, D)
            grouped = queries[0].index_select(0, group.rows).view(num, *heads)
            mixed = _all_seen(grouped, keys, values, group.mask, passing.cap)
            out[0].index_copy_(0, group.rows, mixed.flatten(1, 2))
        if passing.alone:
            rows = torch.split(queries.reshape(-1, *heads), 1)  # (1, K, N / K, D) each
            mixed_rows = []
            for index, row in passing.alone:
                keys, values = (part[:, -self.window or None :] for part in _both(pool.view(layer, index)))
                # Four dims: with three, torch takes its slow path on a CPU.
                mixed_rows.append(_all_seen(rows[row], keys.unsqueeze(0), values.unsqueeze(0), None, passing.cap))
            out[0].index_copy_(0, passing.rows_alone, torch.cat(mixed_rows).flatten(1, 2))
        return out.transpose(1, 2)


def _both(stored: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return stored[0], stored[-1]


def _all_seen(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, cap: float) -> Tensor:
    # Attention of queries to all keys that the mask leaves; keys have as many heads as queries.
    if not cap:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    if mask is None:
        mask = query.new_zeros(query.shape[2], key.shape[2])
    return plain_products(query, key, value, mask, cap)


def _kind(span: Span) -> int:
    # A text of one token is a beginning and could be either; it costs less beside the others of one token.
    if span.end - span.first == 1:
        return 2
    return 0 if span.first == 0 else 1


def _length(span: Span) -> int:
    return span.end - span.begin


def _plan(
    spans: Sequence[Span], kernel: AttentionKernel, window: int, device: torch.device, dtype: torch.dtype, cap: float
) -> MaskPlan:
    """The mask plan of beginnings of texts, end to end."""
    if not spans:
        return None
    positions = torch.cat([torch.arange(span.end) for span in spans])[None]
    return make_plan(kernel, document_begins(positions), window, device, dtype, cap)


def _mask(span: Span, window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    queries, keys = (torch.arange(first, span.end, device=device) for first in (span.first, span.begin))
    return additive_mask(torch.zeros_like(queries), queries, keys, window, dtype)


def _similar(spans: Sequence[Span], indices: Sequence[int]) -> list[list[int]]:
    """The spans of `indices` in groups of similar lengths, longest first."""
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
    places: list[int] = []
    for index, length in zip(group, lengths, strict=True):
        span = spans[index]
        own = places_of(span.pages, span.begin, span.end, page_tokens)
        # Places beyond the end are masked, but must hold numbers: 0 times inf would be nan.
        places += own + own[-1:] * (longest - length)
    mask = None
    if min(lengths) < longest:
        beyond = torch.arange(longest) >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(beyond.shape, dtype=dtype).masked_fill_(beyond, -torch.inf)[:, None, None].to(device)
    rows = torch.tensor([index + shift for index in group], device=device)
    return _Together(rows, torch.tensor(places, device=device), mask)
