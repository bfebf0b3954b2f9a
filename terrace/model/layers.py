"""The parts of a decoder layer: norms, rotary positions, attention, MLP.

Plain single-device PyTorch: the sizes come from a `ModelConfig`, a forward pass sees whole tensors, and
nothing here knows how they may be sharded.

Shape legend: B batch, S sequence, H hidden, N query heads, K key-value heads, D head_dim, R rotary_dim,
I intermediate.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.attention import PerLength, PerMicroBatch, Plans, attend
from terrace.model.attention_plans import plans_of
from terrace.model.cache import LayerCache
from terrace.model.config import ModelConfig
from terrace.model.operation import Runs, keeping
from terrace.model.rope import RopeScaling

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


Normal = Callable[[Tensor, Tensor, float], Tensor]  # (x, weight, eps), as `rms_norm`


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) by its root mean square, times weight (H).

    `F.rms_norm` computes in fp32 for half-precision input and in the input's precision otherwise.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """Scale to unit root mean square over the last dim; (..., H) to (..., H)."""

    def __init__(self, size: int, eps: float, **where: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, **where))
        self.normal: Normal = rms_norm  # or another kernel of it

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., H)."""
        return self.normal(x, self.weight, self.eps)


def build_norm(config: ModelConfig, **where: Any) -> nn.Module:
    """The model's norm over H; `where` is the device and dtype."""
    if config.norm == "rms":
        return RMSNorm(config.hidden_size, config.norm_eps, **where)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, **where)


class Rotary:
    """Rotary position embedding in the rotate-half convention, on the first `dim` elements of a head.

    Pair i is elements i and i + R/2; position s turns it by s * theta^(-2i/R), or by less as `scaling` says.
    The tables are computed on first use and kept here, not in module buffers, so that a model built on the meta
    device holds nothing but its parameters. One object serves all layers.
    """

    def __init__(self, dim: int, theta: float, scaling: RopeScaling | None = None) -> None:
        self.dim = dim
        self.theta = theta
        self.scaling = scaling
        self._tables = PerLength()
        self._packed = PerMicroBatch()

    def tables(self, sequence: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (S, R/2), computed in fp32 (fp64 for fp64) and cast to `dtype`."""
        return self._tables.made(
            (sequence, device, dtype), lambda: self.tables_at(torch.arange(sequence, device=device), dtype)
        )

    def tables_at(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin as in `tables`, (S, R/2) or (B, S, R/2), of tokens at `positions` (S) or (B, S)."""
        compute = torch.promote_types(dtype, torch.float32)
        exponents = torch.arange(0, self.dim, 2, device=positions.device, dtype=compute) / self.dim  # (R/2)
        frequencies = _scaled(1.0 / self.theta**exponents, self.scaling)
        angles = positions.to(compute).unsqueeze(-1) * frequencies  # (S, R/2) or (B, S, R/2)
        return angles.cos().to(dtype), angles.sin().to(dtype)

    def __call__(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Turn x (B, N, S, D) by `positions` (B, S) int64, or else by 0 .. S-1.

        The result has the heads of a token side by side in memory. Attention lays its output out as its query, so
        that merging the heads there is a view, where it would be a copy that is kept for the backward.
        """
        return self.turn(x, *self._tables_of(x, positions))

    def both(self, query: Tensor, key: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Query (B, N, S, D) and key (B, K, S, D), each turned as by the call."""
        return self.turn_both(query, key, *self._tables_of(query, positions))

    def _tables_of(self, x: Tensor, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        if positions is None:
            return self.tables(x.shape[-2], x.device, x.dtype)
        return self._packed.get(positions, x.dtype, lambda: self.tables_at(positions, x.dtype))

    def turn(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Turn x (B, N, S, D) by tables (S, R/2) or (B, S, R/2); see the call."""
        cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)  # (S, 1, R/2) or (B, S, 1, R/2)
        x = x.transpose(-3, -2)  # (B, S, N, D)
        half = self.dim // 2
        first, second, rest = x[..., :half], x[..., half : self.dim], x[..., self.dim :]
        # Halves are rotated against each other, as in Hugging Face's layout.
        parts = [first * cos - second * sin, second * cos + first * sin]
        if self.dim < x.shape[-1]:
            parts.append(rest)
        return torch.cat(parts, dim=-1).transpose(-3, -2)

    def turn_both(self, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Query and key, each as by `turn`; a kernel for both may stand here."""
        return self.turn(query, cos, sin), self.turn(key, cos, sin)


class Attention(nn.Module):
    """Causal self-attention with grouped key-value heads; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, plans: Plans | None = None, **where: Any) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias or config.qkv_bias
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.rotary = rotary
        self.plans: Plans = plans or plans_of(config)
        self.query = nn.Linear(hidden, query_size, bias=bias, **where)
        self.key = nn.Linear(hidden, key_size, bias=bias, **where)
        self.value = nn.Linear(hidden, key_size, bias=bias, **where)
        self.output = nn.Linear(query_size, hidden, bias=config.attention_bias, **where)
        # The three products as one, where terrace.model.arranged has joined their matrices; its parts.
        self.joined: nn.Module | None = None
        self.run: Runs = keeping
        self._sizes = query_size, key_size, key_size
        self.query_norm = RMSNorm(config.head_dim, config.norm_eps, **where) if config.qk_norm else None
        self.key_norm = RMSNorm(config.head_dim, config.norm_eps, **where) if config.qk_norm else None

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Causal attention within x (B, S, H).

        `positions` (B, S) int64, each token's place in its document, restrict a token to its own document; a `cache`
        adds the tokens before these.
        """
        if self.joined is None:
            # One after the other: a product is dropped once its heads are normalised.
            query = self._heads(self.query(x), self.query_norm)
            key = self._heads(self.key(x), self.key_norm)
            value = self._heads(self.value(x), None)
        else:
            parts = self.joined(x).split(self._sizes, -1)
            query, key = self._heads(parts[0], self.query_norm), self._heads(parts[1], self.key_norm)
            value = self._heads(parts[2], None)
        # Looked up before rotation: it depends on positions and shapes only.
        plan = None if cache is not None and cache.continues else self.plans.plan(positions, query)
        if self.rotary is not None:
            query, key = self.rotary.both(query, key, positions)
        attends = attend if cache is None else cache.attend

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = attends(query, key, value, plan)  # (B, N, S, D)
            return mixed.transpose(1, 2).flatten(2)  # (B, S, N*D)

        return self.run(core, (query, key, value), self.output)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        x = x.view(*x.shape[:-1], -1, self.head_dim)  # (B, S, N*D) -> (B, S, N, D)
        return (x if norm is None else norm(x)).transpose(1, 2)  # (B, N, S, D)


class MLP(nn.Module):
    """The feed-forward part, gated or plain; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        hidden, intermediate, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.activation = ACTIVATIONS[config.activation]
        self.gate = nn.Linear(hidden, intermediate, bias=bias, **where) if config.gated_mlp else None
        self.joined: nn.Module | None = None  # gate and up, as in Attention
        self.run: Runs = keeping
        self.up = nn.Linear(hidden, intermediate, bias=bias, **where)
        self.down = nn.Linear(intermediate, hidden, bias=bias, **where)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to each position of x (B, S, H) by itself."""
        if self.joined is not None:
            gate, up = self.joined(x).chunk(2, -1)
            return self.run(self._gated, (gate, up), self.down)
        up = self.up(x)  # (B, S, I)
        if self.gate is None:
            return self.run(self.activation, (up,), self.down)
        return self.run(self._gated, (self.gate(x), up), self.down)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


def _scaled(frequencies: Tensor, scaling: RopeScaling | None) -> Tensor:
    if scaling is None:
        return frequencies
    slow = frequencies / scaling.factor
    if scaling.rope_type == "linear":
        return slow
    # How many turns the positions of the original training hold: few turns are slowed down, many stay as they are.
    turns = frequencies * (scaling.original_max_position_embeddings / (2 * math.pi))
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - kept) * slow + kept * frequencies
