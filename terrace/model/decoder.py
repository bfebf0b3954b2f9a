"""A decoder as a list of blocks, in plain single-device PyTorch.

`build_blocks` returns one module a block, in the order of `block_specs`; running them one after the other
is the model. The modules are usually built on the meta device and given their values later, so they own
parameters and nothing else: no buffers. A tied head holds the embedding's own `Parameter` object. Where a row holds
several documents, every block takes the position of each token in its own: see `terrace.model.attention`.

Shape legend: B batch, S sequence, H hidden, V vocabulary, P max_positions.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention_plans import AttentionPlans, plans_of
from terrace.model.cache import LayerCache
from terrace.model.config import ModelConfig
from terrace.model.experts.mixture import Mixture
from terrace.model.layers import MLP, Attention, Rotary, build_norm
from terrace.model.loss_chunks import CACHED_NUMEL, slices
from terrace.model.operation import Runs, keeping

_Module = TypeVar("_Module", bound=nn.Module)
IGNORE_INDEX = -100  # the label of a position that has no target, as in Hugging Face data


class Embedding(nn.Module):
    """Tokens (B, S) int64 to hidden states (B, S, H), with learned positions where the model has them."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.positions: nn.Parameter | None = None
        if config.learned_positions:
            self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden_size, **where))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Look up tokens (B, S), at `positions` (B, S) or else 0 .. S-1.

        Raises `ModelError` when one exceeds the learned positions.
        """
        hidden = F.embedding(tokens, self.weight)  # (B, S, H)
        return hidden if self.positions is None else self.placed(hidden, tokens, positions)

    def placed(self, hidden: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """`hidden` (B, S, H) of tokens (B, S) with learned positions added; raises as `forward` does."""
        assert self.positions is not None, "asked only where positions are learned"
        check_positions(tokens, positions, self.positions.shape[0])
        if positions is None:
            return hidden + self.positions[: tokens.shape[-1]]
        return hidden + F.embedding(positions, self.positions)


class DecoderLayer(nn.Module):
    """Attention and an MLP, or a mixture of experts, with residuals; (B, S, H) to (B, S, H)."""

    def __init__(self, config: ModelConfig, rotary: Rotary | None, plans: AttentionPlans, **where: Any) -> None:
        super().__init__()
        self.parallel_residual = config.parallel_residual
        self.attention_norm = build_norm(config, **where)
        self.attention = Attention(config, rotary, plans, **where)
        self.mlp_norm = build_norm(config, **where)
        self.mlp = MLP(config, **where) if config.experts is None else Mixture(config, **where)
        self.run: Runs = keeping  # of the norms; attention and MLP have their own

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """The layer's output for x (B, S, H); `positions` (B, S) mark documents if a row holds several.

        With a `cache`, handed over by terrace.model.cache, x continues the cached tokens.
        """

        def attended(normalised: Tensor) -> Tensor:
            output: Tensor = self.attention(normalised, positions, cache)
            return output

        after = x + self.run(self.attention_norm, (x,), attended)
        # In the parallel form the MLP reads the layer's input, not what attention made of it.
        return after + self.run(self.mlp_norm, (x if self.parallel_residual else after,), self.mlp)


class Head(nn.Module):
    """Final norm and output matrix; (B, S, H) to logits (B, S, V)."""

    def __init__(self, config: ModelConfig, weight: nn.Parameter | None, **where: Any) -> None:
        super().__init__()
        if weight is None:
            weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.weight = weight
        self.norm = build_norm(config, **where)
        # The product with `weight`, where terrace.model.arranged keeps it in another form.
        self.product: Callable[[Tensor], Tensor] | None = None
        self.to_gradient = to_gradient  # of logits, for a runtime that has them a chunk at a time

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of x (B, S, H)."""
        x = self.norm(x)
        return F.linear(x, self.weight) if self.product is None else self.product(x)


class ValueHead(nn.Module):
    """Final norm and a linear layer with one output, without a bias; (B, S, H) to values (B, S), in fp32 at least."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.score = nn.Linear(config.hidden_size, 1, bias=False, **where)
        self.norm = build_norm(config, **where)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Values of x (B, S, H)."""
        values: Tensor = self.score(self.norm(x)).squeeze(-1)
        return values.to(torch.promote_types(values.dtype, torch.float32))


def build_blocks(
    config: ModelConfig, device: torch.device | str = "meta", dtype: torch.dtype = torch.float32
) -> list[nn.Module]:
    """The model's blocks without values: on a real device their memory is uninitialised.

    Names and shapes are as in `block_specs`. A tied head's `weight` is the embedding's Parameter itself, so it also
    appears in the head's `named_parameters`.
    """
    meta: dict[str, Any] = {"device": "meta", "dtype": dtype}
    rotary = None if config.learned_positions else Rotary(config.rotary_dim, config.rope_theta, config.rope_scaling)
    # Built on meta first, so that no layer draws from the global random generator.
    embedding = _placed(Embedding(config, **meta), device)
    # One object, so that all layers share a micro-batch's mask plan.
    plans = plans_of(config)
    layers = [
        _placed(DecoderLayer(config.of_layer(index), rotary, plans, **meta), device)
        for index in range(config.num_layers)
    ]
    if config.scalar_head:
        return [embedding, *layers, _placed(ValueHead(config, **meta), device)]
    head = Head(config, None, **meta)
    if not config.tied_embeddings:
        return [embedding, *layers, _placed(head, device)]
    # Only the norm: the tied weight exists already, and would be replaced.
    _placed(head.norm, device)
    head.weight = embedding.weight
    return [embedding, *layers, head]


def _placed(module: _Module, device: torch.device | str) -> _Module:
    # Not `to_empty`: its `empty_like` of a meta tensor makes torch import sympy, 0.4 s in every process.
    if torch.device(device).type != "meta":
        for each in module.modules():
            for name, value in each._parameters.items():
                if value is not None:
                    empty = torch.empty(value.shape, dtype=value.dtype, device=device)
                    each._parameters[name] = nn.Parameter(empty, requires_grad=value.requires_grad)
    return module


def check_positions(tokens: Tensor, positions: Tensor | None, limit: int) -> None:
    """Raise `ModelError` when tokens (B, S) stand, at `positions` (B, S) or 0 .. S-1, beyond the `limit` learned."""
    longest = tokens.shape[-1]
    if positions is not None:
        if positions.shape != tokens.shape:
            raise ModelError(f"positions {tuple(positions.shape)} must have the shape of tokens {tuple(tokens.shape)}")
        longest = int(positions.max()) + 1
        if int(positions.min()) < 0:
            raise ModelError(f"position {int(positions.min())} is negative: 0 begins a document")
    if longest > limit:
        raise ModelError(f"a sequence of {longest} tokens needs as many positions; the model has {limit}")


def to_gradient(logits: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    """The SUM of the cross entropies as `token_loss`, fp64; logits (N, V) become `scale` times its gradient, in place.

    Labels (N) are as there. Computed in fp32 at least.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    step = max(1, CACHED_NUMEL // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    counted = labels != IGNORE_INDEX
    at = labels.masked_fill(~counted, 0).unsqueeze(-1)
    losses = logits.new_empty(len(logits), dtype=wide)
    for rows in slices(len(logits), step):
        # Rows per turn fit the CPU's caches: several passes over the same logits follow.
        x = torch.log_softmax(logits[rows], -1, dtype=wide)
        losses[rows] = x.gather(-1, at[rows]).squeeze(-1)
        x.exp_().scatter_add_(-1, at[rows], x.new_full((1, 1), -1.0).expand_as(at[rows]))
        # Ignored labels get no gradient.
        logits[rows] = x.mul_(counted[rows].unsqueeze(-1) * scale)
    return -losses.masked_fill(~counted, 0.0).sum(dtype=torch.float64)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """The SUM of the cross entropies of logits (B, S, V) against labels (B, S), a scalar.

    Labels are already shifted: `labels[b, s]` is the token that follows position s, or `IGNORE_INDEX`. The sum is
    computed in fp32 at least; the caller divides once by the tokens of the whole step.
    """
    assert labels.shape == logits.shape[:-1], f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}"
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
