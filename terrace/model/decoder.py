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
from terrace.model.kinds import LayerKind
from terrace.model.latent_attention import LatentAttention
from terrace.model.layers import MLP, Attention, build_norm
from terrace.model.loss_chunks import CACHED_NUMEL, slices
from terrace.model.operation import Runs, keeping
from terrace.model.rotary import Rotary, rotary_of

_Module = TypeVar("_Module", bound=nn.Module)
IGNORE_INDEX = -100  # the label of a position that has no target, as in Hugging Face data


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Rows of an embedding times `scale`, which is first rounded to their dtype, as in the released Gemma models."""
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


class Embedding(nn.Module):
    """Tokens (B, S) int64 to hidden states (B, S, H), with learned positions where the model has them."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.scale = config.scales.embedding
        self.positions: nn.Parameter | None = None
        if config.learned_positions:
            self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden_size, **where))

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """Look up tokens (B, S), at `positions` (B, S) or else 0 .. S-1.

        Raises `ModelError` when one exceeds the learned positions.
        """
        hidden = scaled(F.embedding(tokens, self.weight), self.scale)  # (B, S, H)
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
        self.parallel_residual, self._scale = config.parallel_residual, config.scales.residual

        def norm(place: str) -> nn.Module | None:
            return build_norm(config, **where) if config.norms in (place, "both") else None

        self.attention_norm = norm("before")
        attention = LatentAttention if config.latent.key_value_rank else Attention
        self.attention = attention(config, rotary, plans, **where)
        self.attention_output_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MLP(config, **where) if config.experts is None else Mixture(config, **where)
        self.mlp_output_norm = norm("after")
        self.run: Runs = keeping  # runs the norms before attention and MLP, which have their own

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """The layer's output for x (B, S, H); `positions` (B, S) mark documents if a row holds several.

        With a `cache`, handed over by terrace.model.cache, x continues the cached tokens.
        """

        def attended(normalised: Tensor) -> Tensor:
            output: Tensor = self.attention(normalised, positions, cache)
            return output

        after = self._added(x, self._passed(x, self.attention_norm, attended, self.attention_output_norm))
        # In the parallel form the MLP reads the layer's input, without attention's output.
        source = x if self.parallel_residual else after
        return self._added(after, self._passed(source, self.mlp_norm, self.mlp, self.mlp_output_norm))

    def _passed(
        self,
        x: Tensor,
        before: nn.Module | None,
        sublayer: Callable[[Tensor], Tensor],
        after: nn.Module | None,
    ) -> Tensor:
        y = sublayer(x) if before is None else self.run(before, (x,), sublayer)
        return y if after is None else after(y)

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self._scale == 1.0 else torch.add(x, y, alpha=self._scale)


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
        self.divisor, self.cap = config.scales.logit_divisor, config.scales.logit_cap

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of x (B, S, H)."""
        x = self.entering(x)
        logits = F.linear(x, self.weight) if self.product is None else self.product(x)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def entering(self, x: Tensor) -> Tensor:
        """The vectors (B, S, H) that the output matrix multiplies."""
        y: Tensor = self.norm(x)
        return y if self.divisor == 1.0 else y / self.divisor


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
    # Built on meta first, so that no layer draws from the global random generator.
    embedding = _placed(Embedding(config, **meta), device)
    # One object for all layers that attend alike, so that they share a micro-batch's tables and mask plan.
    rotaries: dict[LayerKind, Rotary | None] = {}
    plans: dict[int, AttentionPlans] = {}
    layers = []
    for of in map(config.of_layer, range(config.num_layers)):
        turns = LayerKind(rope_theta=of.rope_theta, rope_scaling=of.rope_scaling)
        if turns not in rotaries:
            rotaries[turns] = rotary_of(of)
        if of.sliding_window not in plans:
            plans[of.sliding_window] = plans_of(of)
        layers.append(_placed(DecoderLayer(of, rotaries[turns], plans[of.sliding_window], **meta), device))
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
