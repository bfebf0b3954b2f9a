"""The key-value cache of a decoder that generates text.

A token's keys and values depend only on the tokens before it, so the next token needs its own and the cached ones. A
`KVCache` holds them for several rows of text, preallocated; it is handed to `begin_rows`, which fills empty rows as the
beginnings of their texts pass the layers, end to end and without padding, and to `continue_rows`, which takes one more
token of each of the first rows, each at its own place. Nothing else knows of it.

With a sliding window of W a layer needs only the last W keys, and the cache is a ring of W: token p lies at p mod W.
Keys are rotated before they are stored, and a softmax has no order, so attention over the ring equals attention over
the row. Without a window a row ends when the cache is full: dropping its first tokens would leave later ones with keys
that have seen them, unlike in a shorter text.

Shape legend: B rows, S tokens of a call, K key-value heads, N query heads, D head_dim, C capacity.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention import MaskPlan, attend
from terrace.model.config import ModelConfig


@dataclass(frozen=True)
class _Places:
    """The places of the next token of each row, the same in all layers."""

    targets: Tensor  # (B K,), among the (rows K C) places of a layer
    seen: list[int]  # entries that each row sees
    mask: Tensor | None  # (B, 1, 1, most seen), where rows see different numbers, but not on a CPU


class KVCache:
    """Keys and values of `num_rows` texts of up to `num_tokens` tokens each, or of any length under a shorter window.

    Raises `ModelError` for more tokens than the model has learned positions.
    """

    def __init__(
        self,
        config: ModelConfig,
        num_rows: int,
        num_tokens: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        if config.learned_positions and num_tokens > config.max_positions:
            raise ModelError(f"{num_tokens} tokens need as many positions; the model has {config.max_positions}")
        # A window longer than the text never wraps round, and learned positions end the text anyway.
        self.is_ring = 0 < config.sliding_window <= num_tokens and not config.learned_positions
        self.capacity = config.sliding_window if self.is_ring else num_tokens
        self.lengths = [0] * num_rows  # tokens of each row so far
        # Preallocated, so that a token costs a write and not a copy of the row.
        shape = (num_rows, config.num_kv_heads, self.capacity, config.head_dim)
        self.layers = [RowsCache(self, shape, device, dtype) for _ in range(config.num_layers)]
        self.passing: _Places | list[tuple[int, int, int]] = []  # or (row, first token, tokens) of each beginning
        self._num_kv_heads = config.num_kv_heads

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def is_full(self, row: int) -> bool:
        """Whether a row has no place for another token."""
        return not self.is_ring and self.lengths[row] >= self.capacity

    def clear(self, row: int) -> None:
        """Forget a row, so that another may begin there."""
        self.lengths[row] = 0

    def move(self, source: int, target: int) -> None:
        """Have row `target` forget its text and take that of row `source`, which is then empty."""
        held = min(self.lengths[source], self.capacity)
        for layer in self.layers:
            for kind in (layer.keys, layer.values):
                kind[target, :, :held] = kind[source, :, :held]
        self.lengths[target], self.lengths[source] = self.lengths[source], 0

    def begin(self, lengths: Mapping[int, int]) -> None:
        """Have the next tokens that pass fill empty rows, each with its number of tokens."""
        beginnings, first = [], 0
        for row, length in lengths.items():
            if self.lengths[row]:
                raise ModelError(
                    f"row {row} of the cache holds {self.lengths[row]} tokens: clear it before it begins anew"
                )
            if length > self.capacity and not self.is_ring:
                raise ModelError(f"{length} tokens do not fit in a cache of {self.capacity}")
            beginnings.append((row, first, length))
            first += length
        self.passing = beginnings

    def advance(self, num_rows: int) -> Tensor:
        """Have a token of each of the first rows pass next; return their positions (B, 1)."""
        full = [row for row in range(num_rows) if self.is_full(row)]
        if full:
            raise ModelError(f"row {full[0]} of the cache is full ({self.capacity} tokens): begin it anew with fewer")
        keys, lengths = self.layers[0].keys, self.lengths[:num_rows]
        heads = range(self._num_kv_heads)
        targets = [
            (row * self._num_kv_heads + head) * self.capacity + length % self.capacity
            for row, length in enumerate(lengths)
            for head in heads
        ]
        seen = [min(length + 1, self.capacity) for length in lengths]
        mask = None
        # Rows of one length need no mask and keep the faster kernel; on a CPU rows of other lengths attend one by one.
        if min(seen) < max(seen) and keys.device.type != "cpu":
            beyond = torch.arange(max(seen), device=keys.device) >= torch.tensor(seen, device=keys.device)[:, None]
            mask = torch.zeros(beyond.shape, dtype=keys.dtype, device=keys.device).masked_fill_(beyond, -torch.inf)
            mask = mask[:, None, None]
        self.passing = _Places(torch.tensor(targets, device=keys.device), seen, mask)
        return torch.tensor(lengths, device=keys.device)[:, None]


class LayerCache(Protocol):
    """What a layer keeps of the tokens before those that pass."""

    @property
    def continues(self) -> bool:
        """Whether the cache itself knows what the passing tokens see, so that they need no mask plan."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (B, K, S, D) of the passing tokens; the attention output of query (B, N, S, D) over all
        that they see.
        """
        ...


class RowsCache:
    """Keys and values (rows, K, C, D) of one layer; `of` holds the places of the tokens that are passing."""

    def __init__(self, of: KVCache, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> None:
        self._of = of
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    @property
    def continues(self) -> bool:
        """Whether the passing tokens continue rows, and so need no mask plan."""
        return isinstance(self._of.passing, _Places)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (B, K, S, D) of the passing tokens; the attention output of query (B, N, S, D) over all
        so far.

        `plan` is the mask plan at the beginning of rows, which are then (1, ., S, D) end to end.
        """
        of, passing = self._of, self._of.passing
        if not isinstance(passing, _Places):
            for row, first, length in passing:
                # A ring keeps only the last tokens of a long beginning.
                kept = torch.arange(max(0, length - of.capacity), length, device=key.device)
                for kind, part in ((self.keys, key), (self.values, value)):
                    kind[row].index_copy_(1, kept % of.capacity, part[0, :, first + kept])
            return attend(query, key, value, plan)
        for kind, part in ((self.keys, key), (self.values, value)):
            # Each row writes at its own place: rows differ in length.
            kind.view(-1, kind.shape[3]).index_copy_(0, passing.targets, part.reshape(-1, kind.shape[3]))
        # Several heads with the same keys are as several queries of one head.
        queries = query.reshape(len(query), self.keys.shape[1], -1, query.shape[3])  # (B, K, N / K, D)
        seen = passing.seen
        if passing.mask is not None or min(seen) == max(seen):
            runs = [(0, len(seen), max(seen))]
        else:
            runs = [(row, row + 1, length) for row, length in enumerate(seen)]
        mixed = [
            F.scaled_dot_product_attention(
                queries[first:end],
                self.keys[first:end, :, :length],
                self.values[first:end, :, :length],
                attn_mask=passing.mask,
            )
            for first, end, length in runs
        ]
        return torch.cat(mixed).flatten(1, 2).unsqueeze(2)  # (B, N, 1, D)


@torch.inference_mode()
def begin_rows(blocks: Sequence[nn.Module], texts: Mapping[int, Sequence[int]], cache: KVCache) -> Tensor:
    """Read the beginning of a text into each row of `texts` in one pass; the logits (B, V) of the last tokens.

    Raises `ModelError` for a row that is not empty.
    """
    cache.begin({row: len(text) for row, text in texts.items()})
    device = cache.layers[0].keys.device
    tokens = torch.tensor([[token for text in texts.values() for token in text]], device=device)
    positions = None
    if len(texts) > 1:
        # Positions restart with each text, which isolates them from each other.
        positions = torch.cat([torch.arange(len(text), device=device) for text in texts.values()])[None]
    x = _through(blocks[:-1], tokens, positions, cache)
    ends = torch.tensor([len(text) for text in texts.values()], device=device).cumsum(0)
    # Only the last tokens' logits are needed, and they are the largest tensor.
    logits: Tensor = blocks[-1](x[:, ends - 1])[0]
    for row, text in texts.items():
        cache.lengths[row] = len(text)
    return logits


@torch.inference_mode()
def continue_rows(blocks: Sequence[nn.Module], tokens: Sequence[int], cache: KVCache) -> Tensor:
    """Take the next token of each of the first rows; the logits (B, V) after them.

    Raises `ModelError` for a row that is full.
    """
    positions = cache.advance(len(tokens))
    x = _through(blocks[:-1], torch.tensor(tokens, device=positions.device)[:, None], positions, cache)
    logits: Tensor = blocks[-1](x)[:, 0]
    for row in range(len(tokens)):
        cache.lengths[row] += 1
    return logits


def _through(blocks: Sequence[nn.Module], tokens: Tensor, positions: Tensor | None, cache: KVCache) -> Tensor:
    x: Tensor = blocks[0](tokens, positions)
    # Lengths move after all layers have stored their keys at the same places: the callers do it.
    for layer, kept in zip(blocks[1:], cache.layers, strict=True):
        x = layer(x, positions, kept)
    return x
