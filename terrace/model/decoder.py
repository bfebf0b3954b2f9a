"""A decoder as a list of blocks, in plain single-device PyTorch.

`build_blocks` returns one module per block, in the order of `block_specs`; the model is their composition. Modules are
usually built on the meta device and get their values later, so they have no buffers, only parameters. A tied head holds
the `Parameter` object of the embedding. If a row has several documents, every block takes the position of each token
within its document: see `terrace.model.attention`.

Shape legend: B batch, S sequence, H hidden, V vocabulary, P max_positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.attention_plans import AttentionPlans, plans_of
from terrace.model.cache import LayerCache
from terrace.model.config import ModelConfig
from terrace.model.delta_net import GatedDeltaNet
from terrace.model.experts.mixture import Mixture
from terrace.model.kinds import LayerKind
from terrace.model.latent_attention import LatentAttention
from terrace.model.layers import MLP, Attention, build_norm
from terrace.model.loss_chunks import CACHED_NUMEL, slices
from terrace.model.operation import Runs, keeping
from terrace.model.rotary import Rotary, rotary_of

_Module = TypeVar("_Module", bound=nn.Module)
IGNORE_INDEX = -100  # label of a position without a target, as in Hugging Face data


def scaled(rows: Tensor, scale: float) -> Tensor:
    """Embeddings times `scale`, which is first rounded to their dtype, as in the released Gemma models."""
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)


def other_of_pair(rows: Tensor) -> Tensor:
    """Rows (B, ...) in which 2i and 2i + 1 have changed places. B must be even."""
    return rows.view(-1, 2, *rows.shape[1:]).flip(1).flatten(0, 1)


def mixed(hidden: Tensor, mix: Tensor) -> Tensor:
    """Embeddings (B, S, H) in which a row has the share `mix` (B) of itself, and the rest of the other of its pair."""
    own = mix.to(hidden.dtype)[:, None, None]
    return own * hidden + (1 - own) * other_of_pair(hidden)


class Embedding(nn.Module):
    """Token embedding, (B, S) int64 to (B, S, H), plus learned positions if the model has them."""

    def __init__(self, config: ModelConfig, **where: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.scale = config.scales.embedding
        self.positions: nn.Parameter | None = None
        if config.learned_positions:
            self.positions = nn.Parameter(torch.empty(config.max_positions, config.hidden_size, **where))

    def forward(self, tokens: Tensor, positions: Tensor | None = None, mix: Tensor | None = None) -> Tensor:
        """Embed tokens (B, S) at `positions` (B, S), by default 0 .. S-1; with `mix` (B), pairs of rows mixed.

        Raises `ModelError` for a position beyond the learned ones.
        """
        hidden = self.looked_up(tokens)
        return self.placed(hidden if mix is None else mixed(hidden, mix), tokens, positions)

    def looked_up(self, tokens: Tensor) -> Tensor:
        """Embeddings (B, S, H) of tokens (B, S), without learned positions."""
        return scaled(F.embedding(tokens, self.weight), self.scale)

    def placed(self, hidden: Tensor, tokens: Tensor, positions: Tensor | None) -> Tensor:
        """Add learned positions, if any, to the embeddings `hidden` (B, S, H) of tokens (B, S). Raises as `forward`."""
        if self.positions is None:
            return hidden
        check_positions(tokens, positions, self.positions.shape[0])
        if positions is None:
            return hidden + self.positions[: tokens.shape[-1]]
        return hidden + F.embedding(positions, self.positions)


class DecoderLayer(nn.Module):
    """Attention and an MLP, or a mixture of experts, with residuals; (B, S, H) to (B, S, H)."""

    def __init__(
        self,
        config: ModelConfig,
        rotary: Rotary | None,
        plans: AttentionPlans,
        before: Mapping[str, nn.Module] = MappingProxyType({}),
        **where: Any,
    ) -> None:
        super().__init__()
        for name, module in before.items():  # of a layer that derives from this one
            self.add_module(name, module)
        self.parallel_residual, self._scale = config.parallel_residual, config.scales.residual

        def norm(place: str) -> nn.Module | None:
            return build_norm(config, **where) if config.norms in (place, "both") else None

        self.attention_norm = norm("before")
        if config.is_linear:
            self.attention: Any = GatedDeltaNet(config, **where)
        else:
            attention = LatentAttention if config.latent.key_value_rank else Attention
            self.attention = attention(config, rotary, plans, **where)
        self.attention_output_norm = norm("after")
        self.mlp_norm = norm("before")
        self.mlp = MLP(config, **where) if config.experts is None else Mixture(config, **where)
        self.mlp_output_norm = norm("after")
        # The final norm of the model, where layers follow that predict further tokens.
        self.output_norm = build_norm(config, **where) if config.num_mtp_layers else None
        self.run: Runs = keeping  # runs the input norms; attention and MLP have their own

    def forward(self, x: Tensor, positions: Tensor | None = None, cache: LayerCache | None = None) -> Tensor:
        """Run the layer on x (B, S, H). `positions` (B, S) mark documents if a row has several.

        With a `cache` (terrace.model.cache), x continues the cached tokens.
        """

        def attended(normalised: Tensor) -> Tensor:
            output: Tensor = self.attention(normalised, positions, cache)
            return output

        after = self._added(x, self._passed(x, self.attention_norm, attended, self.attention_output_norm))
        # In the parallel form the MLP reads the layer's input, without attention's output.
        source = x if self.parallel_residual else after
        output = self._added(after, self._passed(source, self.mlp_norm, self.mlp, self.mlp_output_norm))
        return output if self.output_norm is None else self.output_norm(output)

    def _passed(
        self, x: Tensor, before: nn.Module | None, sublayer: Callable[[Tensor], Tensor], after: nn.Module | None
    ) -> Tensor:
        y = sublayer(x) if before is None else self.run(before, (x,), sublayer)
        return y if after is None else after(y)

    def _added(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y if self._scale == 1.0 else torch.add(x, y, alpha=self._scale)


class BorrowedEmbedding(nn.Module):
    """Looks up tokens (B, S) in the table of another block, set later as `weight`; to (B, S, H)."""

    weight: Tensor | None

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_parameter("weight", None)
        self.scale = config.scales.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeddings of tokens (B, S)."""
        assert self.weight is not None, "the table has been set"
        return scaled(F.embedding(tokens, self.weight), self.scale)


class FurtherTokenLayer(DecoderLayer):
    """Predicts the token `depth` after the next one (DeepSeek-V3, 2412.19437, section 2.2, equations 21 to 23).

        h^k = norm(layer(W [norm(embedding of t_(i + k)); norm(h^(k - 1))])),    k = depth

    The input (B, S, k H) has h^0 .. h^(k - 1) of each token i, all normalised, and the output also h^k. The last layer
    before ends with the model's final norm, so h^0 is what the output matrix reads, as in Megatron-LM, SGLang and vLLM.
    The embedding's table belongs to the model's first block.
    """

    embedding: BorrowedEmbedding
    token_norm: nn.Module
    hidden_norm: nn.Module
    combine: nn.Module

    def __init__(
        self, config: ModelConfig, rotary: Rotary | None, plans: AttentionPlans, depth: int, **where: Any
    ) -> None:
        hidden = config.hidden_size
        before = {
            "embedding": BorrowedEmbedding(config),
            "token_norm": build_norm(config, **where),
            "hidden_norm": build_norm(config, **where),
            "combine": nn.Linear(2 * hidden, hidden, bias=False, **where),
        }
        super().__init__(config, rotary, plans, before, **where)
        self.depth = depth

    def forward(self, x: Tensor, positions: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Run the layer on x (B, S, k H) and the tokens `ahead` (B, S), token i + k at i."""
        assert ahead is not None, "a layer that predicts further tokens reads them"
        newest = x if self.depth == 1 else x[..., x.shape[-1] // self.depth * (self.depth - 1) :].contiguous()
        found = self.token_norm(self.embedding(ahead))
        joined = torch.cat((found, self.hidden_norm(newest)), -1)  # (B, S, 2 H)
        return torch.cat((x, super().forward(self.combine(joined), positions)), -1)


def next_token_blocks(config: ModelConfig, blocks: list[nn.Module]) -> tuple[ModelConfig, list[nn.Module]]:
    """The model and its blocks without the layers that predict further tokens, as generation runs them."""
    if not config.num_mtp_layers:
        return config, blocks
    kept, head = blocks[: 1 + config.num_layers], blocks[-1]
    last: Any = kept[-1]
    assert isinstance(head, Head), "a scalar head predicts no tokens"
    head.norm, last.output_norm, head.depths = last.output_norm, None, 1
    return replace(config, num_mtp_layers=0), [*kept, head]


class Head(nn.Module):
    """Final norm and output matrix; (B, S, H) to logits (B, S, V).

    Where layers predict further tokens, the input (B, S, n H) has n representations of a token, which are normalised
    already; logits are of the first, which predicts the next token (`FurtherTokenLayer`).
    """

    def __init__(self, config: ModelConfig, weight: nn.Parameter | None, **where: Any) -> None:
        super().__init__()
        if weight is None:
            weight = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, **where))
        self.weight = weight
        self.depths = 1 + config.num_mtp_layers
        self.norm = nn.Identity() if config.num_mtp_layers else build_norm(config, **where)
        # Product with `weight` in another memory layout, set by terrace.model.arranged.
        self.product: Callable[[Tensor], Tensor] | None = None
        self.to_gradient = to_gradient  # called per chunk by the runtime; may be a kernel
        self.divisor, self.cap = config.scales.logit_divisor, config.scales.logit_cap

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of x (B, S, H)."""
        x = self.entering(x)
        logits = F.linear(x, self.weight) if self.product is None else self.product(x)
        return self.cap * torch.tanh(logits / self.cap) if self.cap else logits

    def entering(self, x: Tensor) -> Tensor:
        """Input (B, S, H) of the output matrix: x normalised and divided by the logit divisor."""
        y: Tensor = self.norm(x if self.depths == 1 else x[..., : self.weight.shape[1]])
        return y if self.divisor == 1.0 else y / self.divisor


class ValueHead(nn.Module):
    """Final norm and a linear layer with one output and no bias; (B, S, H) to values (B, S) in at least fp32."""

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
    """Build the model's blocks; on a device other than meta their parameters are uninitialised.

    Names and shapes are those of `block_specs`. The `weight` of a tied head is the Parameter of the embedding, so it
    also appears in the head's `named_parameters`.
    """
    meta: dict[str, Any] = {"device": "meta", "dtype": dtype}
    # Built on meta first, so that no layer uses the global random generator.
    embedding = _placed(Embedding(config, **meta), device)
    # Equal layers share one object, and thereby the rotary tables and mask plan of a micro-batch.
    rotaries: dict[LayerKind, Rotary | None] = {}
    plans: dict[int, AttentionPlans] = {}
    layers = []
    for of in map(config.of_layer, range(config.num_layers)):
        rope = LayerKind(rope_theta=of.rope_theta, rope_scaling=of.rope_scaling)
        if rope not in rotaries:
            rotaries[rope] = rotary_of(of)
        if of.sliding_window not in plans:
            plans[of.sliding_window] = plans_of(of)
        layers.append(_placed(DecoderLayer(of, rotaries[rope], plans[of.sliding_window], **meta), device))
    for depth in range(1, 1 + config.num_mtp_layers):
        rope = LayerKind(rope_theta=config.rope_theta, rope_scaling=config.rope_scaling)
        own = FurtherTokenLayer(config, rotaries[rope], plans[config.sliding_window], depth, **meta)
        layers.append(_placed(own, device))
        own.embedding.weight = embedding.weight
    if config.scalar_head:
        return [embedding, *layers, _placed(ValueHead(config, **meta), device)]
    head = Head(config, None, **meta)
    if not config.tied_embeddings:
        return [embedding, *layers, _placed(head, device)]
    # Only the norm is materialised; the weight is the embedding's.
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
    """Raise `ModelError` if tokens (B, S) at `positions` (B, S), by default 0 .. S-1, exceed `limit` positions."""
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
    """Replace logits (N, V) by `scale` times the gradient of `token_loss`, in place; returns the loss SUM in fp64.

    Labels (N) are as in `token_loss`. Computed in at least fp32.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    step = max(1, CACHED_NUMEL // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    counted = labels != IGNORE_INDEX
    at = labels.masked_fill(~counted, 0).unsqueeze(-1)
    losses = logits.new_empty(len(logits), dtype=wide)
    for rows in slices(len(logits), step):
        # The slice fits the CPU's caches, since several passes over it follow.
        x = torch.log_softmax(logits[rows], -1, dtype=wide)
        losses[rows] = x.gather(-1, at[rows]).squeeze(-1)
        x.exp_().scatter_add_(-1, at[rows], x.new_full((1, 1), -1.0).expand_as(at[rows]))
        # Ignored labels get no gradient.
        logits[rows] = x.mul_(counted[rows].unsqueeze(-1).to(wide) * scale)
    return -losses.masked_fill(~counted, 0.0).sum(dtype=torch.float64)


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """SUM of the cross entropies of logits (B, S, V) against labels (B, S), a scalar.

    Labels are already shifted: `labels[b, s]` is the token that follows position s, or `IGNORE_INDEX`. The sum is
    computed in at least fp32; the caller divides once by the tokens of the whole step.
    """
    assert labels.shape == logits.shape[:-1], f"labels {tuple(labels.shape)} do not match logits {tuple(logits.shape)}"
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum")
