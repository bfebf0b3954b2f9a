"""Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1, equations 9 to 19), on one device.

    c = norm(W_DQ x),  q = W_UQ c            queries (N, D); RoPE rotates the last R of D elements, if there is any
    (l, r) = W_DKV x,  l = norm(l)           latent of keys and values; r, R elements with RoPE, is shared by all heads
    (k, v) = W_UKV l                         for each head D - R elements of a key and V of a value
    o = W_O softmax(q (k, r)^T) v

Values are padded with zeros to D elements, as attention kernels and the context axis require; the padding is removed
from the result.

Shape legend: B batch, S sequence, H hidden, N heads, D head_dim, R shared_dim, V value_dim, L rank of keys and values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.attention import MaskPlan, PlannedAttention, Plans, attend
from terrace.model.attention_plans import plans_of
from terrace.model.cache import LayerCache
from terrace.model.config import ModelConfig
from terrace.model.layers import RMSNorm
from terrace.model.operation import Runs, keeping
from terrace.model.rotary import Rotary

_EPS = 1e-6  # of the norms of latents, whatever that of the layers' norms is, as in transformers


class LatentAttention(PlannedAttention):
    """Causal self-attention with keys and values projected from a latent vector; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, plans: Plans | None = None, **where: Any) -> None:
        super().__init__()
        latent, hidden, bias = config.latent, config.hidden_size, config.attention_bias
        heads, self.head_dim, self.value_dim = config.num_heads, config.head_dim, latent.value_dim
        self.rotary, self.shared_dim, self.plans = rotary, latent.shared_dim, plans or plans_of(config)
        self.rank, self.interleaved, self._factor = latent.key_value_rank, latent.interleaved, config.query_factor
        unshared = self.head_dim - self.shared_dim

        def linear(inputs: int, outputs: int, bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=bias, **where)

        def norm(size: int) -> RMSNorm:
            return RMSNorm(size, _EPS, **where)

        # In the order of execution, as in terrace.model.block_operations.
        self.query: nn.Linear | None = None
        if latent.query_rank:
            self.query_down = linear(hidden, latent.query_rank, bias)
        else:
            self.query = linear(hidden, heads * self.head_dim)
        self.key_value_down = linear(hidden, self.rank + self.shared_dim, bias)
        if latent.query_rank:
            self.query_up = linear(latent.query_rank, heads * self.head_dim)
        self.key_value_up = linear(self.rank, heads * (unshared + self.value_dim))
        self.output = linear(heads * self.value_dim, hidden, bias)
        if latent.query_rank:
            self.query_latent_norm = norm(latent.query_rank)
        self.key_value_norm = norm(self.rank)
        self.run: Runs = keeping

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Causal attention over x (B, S, H) and the tokens in `cache`.

        `positions` (B, S) int64 are the positions of tokens within their documents; a token attends only to its own.
        """
        query, compressed = self._entered(x)
        tables = () if self.rotary is None else self.rotary.tables_of(query, positions)
        query = self._turned(query, tables)
        if cache is not None:
            plan = None if cache.continues else self.plans.plan(positions, query)
            output: Tensor = self.output(self._absorbed(query, compressed, tables, cache, plan))
            return output
        plan = self.plans.plan(positions, query)
        key, value = self._keys_and_values(compressed, tables)
        del compressed
        if self._factor != 1.0:
            query = query * self._factor

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = attend(query, key, value, plan)  # (B, N, S, D)
            return mixed[..., : self.value_dim].transpose(1, 2).flatten(2)  # (B, S, N*V)

        return self.run(core, (query, key, value), self.output)

    def _entered(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries (B, N, S, D) without RoPE, and compressed keys and values (B, S, L + R), of x (B, S, H)."""
        # Products of one input are adjacent, so that conversions of it, as to 8 bits, are made once.
        entering = self.query_down if self.query is None else self.query
        query, compressed = entering(x), self.key_value_down(x)
        if self.query is None:
            query = self.query_up(self.query_latent_norm(query))
        return _heads(query, self.head_dim), compressed

    def _turned(self, x: Tensor, tables: Sequence[Tensor]) -> Tensor:
        if self.rotary is None:
            return x
        cos, sin = tables
        return self.rotary.rotate_last(x, cos, sin, self.interleaved)

    def _keys_and_values(self, compressed: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and zero-padded values (B, N, S, D) from `compressed` (B, S, L + R)."""
        unshared_dim = self.head_dim - self.shared_dim
        latent, shared = self._parts(compressed, tables)
        expanded = _heads(self.key_value_up(latent), unshared_dim + self.value_dim)
        unshared, value = torch.split(expanded, [unshared_dim, self.value_dim], -1)
        key = torch.cat([unshared, shared.expand(-1, unshared.shape[1], -1, -1)], -1)
        return key, F.pad(value, (0, self.head_dim - self.value_dim))

    def _parts(self, compressed: Tensor, tables: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The latent (B, S, L), and the shared part of the keys with RoPE (B, 1, S, R)."""
        latent, shared = torch.split(compressed, [self.rank, self.shared_dim], -1)
        return self.key_value_norm(latent), self._turned(shared.unsqueeze(1), tables)

    def _absorbed(
        self, query: Tensor, compressed: Tensor, tables: Sequence[Tensor], cache: LayerCache, plan: MaskPlan
    ) -> Tensor:
        """Attention over a cache of latents, for queries with RoPE (B, N, S, D); returns (B, S, N*V).

        The cache has (l, r) of each token, which serves as the key and value of a single head. W_UK is absorbed into
        the queries, W_UV is applied to the output (section 2.1.2).
        """
        unshared_dim = self.head_dim - self.shared_dim
        up = self.key_value_up.weight.view(-1, unshared_dim + self.value_dim, self.rank)  # (N, D - R + V, L)
        to_key, to_value = torch.split(up, [unshared_dim, self.value_dim], 1)
        unshared, of_shared = torch.split(query, [unshared_dim, self.shared_dim], -1)
        latent, shared = self._parts(compressed, tables)
        key = torch.cat([latent.unsqueeze(1), shared], -1)  # (B, 1, S, L + R)
        # Kernels divide scores by sqrt(L + R), the size of this key.
        factor = self._factor * math.sqrt(key.shape[-1] / self.head_dim)
        query = torch.cat([unshared @ to_key, of_shared], -1) * factor  # (B, N, S, L + R)
        read = cache.attend(query, key, key, plan)[..., : self.rank]  # (B, N, S, L)
        mixed: Tensor = (read @ to_value.transpose(1, 2)).transpose(1, 2).flatten(2)
        return mixed


def _heads(x: Tensor, size: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, size).transpose(1, 2)  # (B, S, N*size) -> (B, N, S, size)
