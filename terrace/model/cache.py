"""The key-value cache of a decoder that generates text.

A token's keys and values depend only on the tokens before it, so the next token needs its own and the cached ones. A
`KVCache` holds them for several rows of text, preallocated; it is handed to `run_cached`, and nothing else knows of it.
A row begins with `run_cached(blocks, tokens, cache, row)`, which fills the row as the tokens pass the layers; then
`run_cached(blocks, tokens, cache)` takes one more token of every row, each at its own place.

With a sliding window of W a layer needs only the last W keys, and the cache is a ring of W: token p lies at p mod W.
Keys are rotated before they are stored, and a softmax has no order, so attention over the ring equals attention over
the row. Without a window a row ends when the cache is full: dropping its first tokens would leave later ones with keys
that have seen them, unlike in a shorter text.

Shape legend: B rows, S tokens of a call, K key-value heads, N query heads, D head_dim, C capacity.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention import MaskPlan, attend
from terrace.model.config import ModelConfig


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
        self.layers = [LayerCache(self, shape, device, dtype) for _ in range(config.num_layers)]
        self.filling: int | None = None  # the row whose beginning passes the layers
        self.places = torch.zeros(num_rows, dtype=torch.int64, device=device)  # where each row's next token is put
        self.num_seen = 0  # entries that the longest row sees
        self.mask: Tensor | None = None  # (B, 1, 1, num_seen), where rows see different numbers

    @property
    def nbytes(self) -> int:
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    def is_full(self, row: int) -> bool:
        """Whether a row has no place for another token."""
        return not self.is_ring and self.lengths[row] >= self.capacity

    def clear(self, row: int) -> None:
        """Forget a row, so that another may begin there."""
        self.lengths[row] = 0

    def begin(self, row: int, num_tokens: int) -> None:
        """Have the next tokens that pass fill an empty row."""
        if self.lengths[row]:
            raise ModelError(f"row {row} of the cache holds {self.lengths[row]} tokens: clear it before it begins anew")
        if num_tokens > self.capacity and not self.is_ring:
            raise ModelError(f"{num_tokens} tokens do not fit in a cache of {self.capacity}")
        self.filling = row

    def advance(self) -> Tensor:
        """Have a token of every row pass next; return the positions (B, 1) of these."""
        full = [row for row in range(len(self.lengths)) if self.is_full(row)]
        if full:
            raise ModelError(f"row {full[0]} of the cache is full ({self.capacity} tokens): begin it anew with fewer")
        self.filling = None
        device, dtype = self.places.device, self.layers[0].keys.dtype
        lengths = torch.tensor(self.lengths, device=device)
        self.places = lengths % self.capacity
        seen = [min(length + 1, self.capacity) for length in self.lengths]
        # Rows of one length need no mask and keep the faster kernel.
        self.num_seen, self.mask = max(seen), None
        if min(seen) < self.num_seen:
            beyond = torch.arange(self.num_seen, device=device) >= torch.tensor(seen, device=device)[:, None]
            mask = torch.zeros(beyond.shape, dtype=dtype, device=device).masked_fill_(beyond, -torch.inf)
            self.mask = mask[:, None, None]
        return lengths[:, None]


class LayerCache:
    """Keys and values (B, K, C, D) of one layer; `of` holds the tokens that are passing."""

    def __init__(self, of: KVCache, shape: tuple[int, ...], device: torch.device | str, dtype: torch.dtype) -> None:
        self._of = of
        self.keys = torch.zeros(shape, device=device, dtype=dtype)
        self.values = torch.zeros(shape, device=device, dtype=dtype)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: MaskPlan) -> Tensor:
        """Store key and value (B, K, S, D) of the passing tokens; the attention output of query (B, N, S, D) over all
        so far.

        `plan` is the mask plan at the beginning of a row.
        """
        of, rows = self._of, torch.arange(len(query), device=query.device)
        if of.filling is not None:
            length, capacity = key.shape[2], of.capacity
            # A ring keeps only the last tokens of a long beginning.
            kept = torch.arange(max(0, length - capacity), length, device=key.device)
            for kind, part in ((self.keys, key), (self.values, value)):
                kind[of.filling].index_copy_(1, kept % capacity, part[0, :, kept])
            return attend(query, key, value, plan)
        for kind, part in ((self.keys, key), (self.values, value)):
            # Each row writes at its own place: rows differ in length.
            kind[rows, :, of.places] = part[:, :, 0]
        keys, values = (kind[:, :, : of.num_seen] for kind in (self.keys, self.values))
        # Several heads with the same keys are as several queries of one head.
        queries = query.reshape(len(query), keys.shape[1], -1, query.shape[3])  # (B, K, N / K, D)
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=of.mask)
        return mixed.flatten(1, 2).unsqueeze(2)  # (B, N, 1, D)


@torch.no_grad()
def run_cached(blocks: Sequence[nn.Module], tokens: Tensor, cache: KVCache, row: int | None = None) -> Tensor:
    """Run tokens through a decoder's blocks and return the logits (B, V) of the last of each row.

    Tokens (1, S) begin `row`, which must be empty; without it tokens (B, 1) are the next one of every row. Raises
    `ModelError` for a row that is full, or not empty when it begins.
    """
    if row is None:
        positions: Tensor | None = cache.advance()
        assert tokens.shape == (len(cache.lengths), 1), f"tokens {tuple(tokens.shape)} are not one for every row"
    else:
        cache.begin(row, tokens.shape[1])
        positions = None
    embedding, *layers, head = blocks
    x = embedding(tokens, positions)
    for layer, kept in zip(layers, cache.layers, strict=True):
        x = layer(x, positions, kept)
    # Only the last token's logits are needed, and they are the largest tensor.
    logits: Tensor = head(x[:, -1:])[:, 0]
    # Lengths move after all layers have stored their keys at the same places.
    for index in range(len(cache.lengths)) if row is None else (row,):
        cache.lengths[index] += tokens.shape[1]
    return logits
