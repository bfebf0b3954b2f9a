"""Modules of a decoder layer: norms, attention, MLP.

Plain single-device PyTorch: sizes come from a `ModelConfig`, a forward pass sees whole tensors, and nothing here
depends on how they are sharded.

Shape legend: B batch, S sequence, H hidden, N query heads, K key-value heads, D head_dim, R rotary_dim, I intermediate.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.model.attention import NO_SINKS, PlannedAttention, Plans
from terrace.model.attention_plans import plans_of
from terrace.model.cache import LayerCache
from terrace.model.config import ModelConfig
from terrace.model.hf.keys import CLAMPED
from terrace.model.operation import Runs, keeping
from terrace.model.rotary import Rotary
from terrace.model.sinks import attend

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


_LIMIT, _STEEPNESS = 7.0, 1.702  # of the clamped gate of gpt-oss


class _ClampedGate(torch.autograd.Function):
    # Saves its two operands alone; autograd would save six tensors.

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        glu = gate.clamp(max=_LIMIT)
        glu.mul_((glu * _STEEPNESS).sigmoid_())
        return up.clamp(-_LIMIT, _LIMIT).add_(1.0).mul_(glu)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = gate.clamp(max=_LIMIT)
        share = (of_gate * _STEEPNESS).sigmoid_()
        of_up = (of_gate * share).mul_(gradient).masked_fill_(up.abs() > _LIMIT, 0.0)
        # d(g s)/dg = s (1 + a g (1 - s)), with s = sigmoid(a g)
        of_gate.mul_(_STEEPNESS).mul_(1.0 - share).add_(1.0).mul_(share).mul_(gradient)
        of_gate.mul_(up.clamp(-_LIMIT, _LIMIT).add_(1.0)).masked_fill_(gate > _LIMIT, 0.0)
        return of_gate, of_up


def clamped_gate(gate: Tensor, up: Tensor) -> Tensor:
    """(u + 1) g sigmoid(1.702 g), with g = min(gate, 7) and u = up within [-7, 7] (gpt-oss, 2508.10925)."""
    result: Tensor = _ClampedGate.apply(gate, up)  # type: ignore[no-untyped-call]
    return result


Gated = Callable[[Tensor, Tensor], Tensor]  # (gate, up)


def gated_by(activation: str) -> Gated:
    """act(gate) * up for the name of an activation, or its own form of both."""
    if activation == CLAMPED:
        return clamped_gate
    function = ACTIVATIONS[activation]
    return lambda gate, up: function(gate) * up


Normal = Callable[[Tensor, Tensor, float], Tensor]  # (x, weight, eps), as `rms_norm`


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x (..., H) divided by its root mean square, times weight (H).

    `F.rms_norm` computes half-precision input in fp32, other input in its own precision.
    """
    return F.rms_norm(x, weight.shape, weight, eps)


class RMSNorm(nn.Module):
    """RMS norm over the last dim, (..., H) to (..., H). Multiplies by `offset` + weight; the offset is 1 in Gemma."""

    def __init__(self, size: int, eps: float, offset: float = 0.0, **where: Any) -> None:
        super().__init__()
        self.eps, self.offset = eps, offset
        self.weight = nn.Parameter(torch.empty(size, **where))
        self.normal: Normal = rms_norm  # may be replaced by an equivalent kernel

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., H)."""
        return self.normal(x, self.weight + self.offset if self.offset else self.weight, self.eps)


def build_norm(config: ModelConfig, **where: Any) -> nn.Module:
    """Build the model's norm over H; `where` is device and dtype."""
    if config.norm == "rms":
        return _rms_norm(config, config.hidden_size, **where)
    return nn.LayerNorm(config.hidden_size, eps=config.norm_eps, **where)


class Attention(PlannedAttention):
    """Causal self-attention with grouped key-value heads; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, plans: Plans | None = None, **where: Any) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias or config.qkv_bias
        query_size, key_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.rotary = rotary
        self.plans = plans or plans_of(config)
        self.query = nn.Linear(hidden, query_size, bias=bias, **where)
        self.key = nn.Linear(hidden, key_size, bias=bias, **where)
        self.value = nn.Linear(hidden, key_size, bias=bias, **where)
        self.gate = nn.Linear(hidden, query_size, bias=bias, **where) if config.attention_gate else None
        self.output = nn.Linear(query_size, hidden, bias=config.attention_bias, **where)
        self.sinks: Tensor = nn.Parameter(torch.empty(config.num_heads, **where)) if config.has_sinks else NO_SINKS
        # Query, key and value in one product, if terrace.model.arranged has joined them; `_sizes` are their widths.
        self.joined: nn.Module | None = None
        self.run: Runs = keeping
        self._sizes = query_size, key_size, key_size
        self._factor = config.query_factor
        normed = (query_size, key_size) if config.whole_qk_norm else (config.head_dim, config.head_dim)
        self.query_norm = _rms_norm(config, normed[0], **where) if config.qk_norm else None
        self.key_norm = _rms_norm(config, normed[1], **where) if config.qk_norm else None
        self._norms_whole = config.whole_qk_norm

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Causal attention over x (B, S, H) and the tokens in `cache`.

        `positions` (B, S) int64 are the positions of tokens within their documents; a token attends only to its own.
        """
        if self.joined is None:
            # In sequence, so that each product is freed once its heads are normalised.
            query = self._heads(self.query(x), self.query_norm)
            key = self._heads(self.key(x), self.key_norm)
            value = self._heads(self.value(x), None)
        else:
            parts = self.joined(x).split(self._sizes, -1)
            query, key = self._heads(parts[0], self.query_norm), self._heads(parts[1], self.key_norm)
            value = self._heads(parts[2], None)
        gate = None if self.gate is None else self.gate(x)
        if self._factor != 1.0:
            query = query * self._factor
        # Before the rotation: the plan depends only on positions and shapes.
        plan = None if cache is not None and cache.continues else self.plans.plan(positions, query)
        if self.rotary is not None:
            query, key = self.rotary.both(query, key, positions)
        attends = attend if cache is None else cache.attend

        def core(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            mixed = attends(query, key, value, plan, self.sinks)  # (B, N, S, D)
            return mixed.transpose(1, 2).flatten(2)  # (B, S, N*D)

        def read(mixed: Tensor) -> Tensor:
            output: Tensor = self.output(mixed if gate is None else gate.sigmoid() * mixed)
            return output

        return self.run(core, (query, key, value), read)

    def _heads(self, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None and self._norms_whole:
            x, norm = norm(x), None
        x = x.view(*x.shape[:-1], -1, self.head_dim)  # (B, S, N*D) -> (B, S, N, D)
        return (x if norm is None else norm(x)).transpose(1, 2)  # (B, N, S, D)


class MLP(nn.Module):
    """MLP, gated or plain; (B, S, H) to (B, S, H)."""

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
        """Apply the MLP to x (B, S, H)."""
        if self.joined is not None:
            gate, up = self.joined(x).chunk(2, -1)
            return self.run(self._gated, (gate, up), self.down)
        up = self.up(x)  # (B, S, I)
        if self.gate is None:
            return self.run(self.activation, (up,), self.down)
        return self.run(self._gated, (self.gate(x), up), self.down)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


def _rms_norm(config: ModelConfig, size: int, **where: Any) -> RMSNorm:
    return RMSNorm(size, config.norm_eps, float(config.norm_offset), **where)
