"""Small models, batches and clusters for tests of plans, programs and the runtime.

The toy model is awkward on purpose: tied embeddings, a frozen matrix, a parameter of one element, sizes
that no world size divides, sequences with different numbers of labels, and one without any.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import IGNORE_INDEX, build_blocks, token_loss
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initialise
from terrace.model.params import STACKED, ParamSpec
from terrace.model.spec import BlockSpec, freeze
from terrace.plan.layout import Layout
from terrace.plan.plan import Plan
from terrace.plan.wire import PLACEABLE
from terrace.runtime.batch import Batch, places_of
from terrace.runtime.describe import describe
from terrace.runtime.further_tokens import next_and_further_tokens
from tests.support.toy_tables import (
    DEEP,
    FROZEN_LAYER,
    FROZEN_SINKS,
    GEMMA2,
    GEMMA3,
    GLM,
    GPT2,
    GRANITE,
    KIMI,
    LATENT,
    LINEAR,
    LLAMA,
    NEOX,
    NEXT,
    QWEN2,
    QWEN3,
    SIXTEENS,
    SMOLLM3,
    SUNK,
    VOCAB,
    WIDE,
    WIDE_GPT2,
)

HIDDEN, SEQUENCE = 6, 6
TIER_NAMES = ("package", "node", "system", "site")


@cache
def cluster_of(*sizes: int, memory_bytes: float = 2e9) -> Cluster:
    """A cluster with these tier sizes, innermost first, named package, node, system and site."""
    local = load_cluster("local")
    tiers = tuple(replace(local.tiers[0], name=name, size=size) for name, size in zip(TIER_NAMES, sizes, strict=False))
    return replace(
        local, name="test", device=replace(local.device, memory_bytes=memory_bytes, headroom="0%"), tiers=tiers
    )


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCAB, HIDDEN) * 0.3)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.weight)


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, 2 * HIDDEN)
        self.down = nn.Linear(2 * HIDDEN, HIDDEN)
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gain * self.down(F.gelu(self.up(self.norm(x))))
        return out


class _Stacks(nn.Module):
    """Three MLPs whose outputs are added up, their parameters in stacks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Parameter(torch.randn(3, 2 * HIDDEN, HIDDEN) * 0.3)
        self.bias = nn.Parameter(torch.randn(3, 2 * HIDDEN) * 0.3)
        self.down = nn.Parameter(torch.randn(3, HIDDEN, 2 * HIDDEN) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.einsum("bsh,eih->besi", self.norm(x), self.up) + self.bias[:, None]
        return x + torch.einsum("besi,ehi->bsh", F.gelu(inner), self.down)


class _Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.weight)


def _toy() -> list[nn.Module]:
    torch.manual_seed(0)
    embedding, layers = _Embedding(), [_Layer() for _ in range(3)]
    layers[1].up.weight.requires_grad = False
    return [embedding, *layers, _Head(embedding.weight)]


def _stacked() -> list[nn.Module]:
    torch.manual_seed(0)
    embedding = _Embedding()
    return [embedding, _Stacks(), _Layer(), _Stacks(), _Head(embedding.weight)]


def _with_stacks(blocks: Sequence[nn.Module]) -> tuple[BlockSpec, ...]:
    stacks = {"up": ("intermediate", "hidden"), "bias": ("intermediate",), "down": ("hidden", "intermediate")}

    def declared(param: ParamSpec) -> ParamSpec:
        names = (STACKED, *stacks.get(param.name, ()))
        return replace(param, dims=tuple(zip(names, param.shape, strict=True))) if len(names) > 1 else param

    specs = describe(blocks, [f"block.{index}" for index in range(len(blocks))])
    return tuple(replace(spec, params=tuple(map(declared, spec.params))) for spec in specs)


def _summed_cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=-100)


def _decoder(config: ModelConfig) -> Callable[[], list[nn.Module]]:
    def build() -> list[nn.Module]:
        blocks = build_blocks(config, dtype=torch.float64)
        initialise(blocks, replace(config, init_std=0.3), seed=0, dtype=torch.float64)
        return blocks

    return build


@dataclass(frozen=True)
class Model:
    """How to build a model in fp64, the same on every rank, and its summed loss."""

    build: Callable[[], list[nn.Module]]
    objective: Callable[[Tensor, Tensor], Tensor]
    declared: tuple[BlockSpec, ...] = ()  # what a tensor axis needs to know
    config: ModelConfig | None = None  # of a decoder

    def blocks(self, dtype: torch.dtype) -> list[nn.Module]:
        """Fresh blocks; a shared parameter stays shared."""
        blocks = self.build()
        for block in blocks:
            for parameter in block.parameters():
                parameter.data = parameter.data.to(dtype)
        return blocks


def _decoder_model(table: dict[str, object], frozen: Sequence[str] = (), zeroed: str = "", **changes: object) -> Model:
    config = replace(parse_model(table), **changes)  # type: ignore[arg-type]
    specs = freeze(block_specs(config), frozen)
    decoder = _decoder(config)

    @cache
    def prototype() -> list[nn.Module]:
        blocks = decoder()
        for block, spec in zip(blocks, specs, strict=True):
            trainable = {param.name: param.trainable for param in spec.params}
            for name, parameter in block.named_parameters():
                parameter.requires_grad = trainable.get(name, parameter.requires_grad)
                if zeroed and name.endswith(zeroed):
                    parameter.data.zero_()
                is_of_experts = parameter.dim() == 2 and name.endswith("bias")
                if is_of_experts or name.endswith(("router.bias", "logit_bias")):  # one that moves choices
                    parameter.data.copy_(torch.linspace(-0.3, 0.3, parameter.numel()).view_as(parameter))
        return blocks

    return Model(lambda: deepcopy(prototype()), token_loss, specs, config)


FURTHER_WEIGHT = 0.3


def _further(table: dict[str, object], **changes: Any) -> Model:
    """A decoder with layers that predict further tokens."""
    objective: Any = next_and_further_tokens(FURTHER_WEIGHT)  # the engine's own form of one
    return replace(_decoder_model(table, **changes), objective=objective)


# Mixtures: of two layers, the second grouped and after a dense one; and of six, for pipelines.
_MIXTURE = ExpertsConfig(num_experts=4, per_token=2, intermediate_size=5)
_GROUPED = replace(_MIXTURE, num_experts=6, gate="sigmoid", scale=1.5, num_groups=3, kept_groups=2, biased=True)
_GROUPED = replace(_GROUPED, shared_size=7, dense_layers=(0,))
_SHARED = replace(_MIXTURE, normalized=False, shared_size=6, shared_gate=True)
_FROZEN_EXPERTS = ("layers.1.mlp.*", "layers.0.mlp.down.weight", "layers.0.mlp.router.weight")
# Of eight experts, for eight ranks.
_EXPERTS = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=8)
_EIGHT_GROUPED = replace(_EXPERTS, per_token=3, gate="sigmoid", scale=1.5, num_groups=4, kept_groups=2, biased=True)

# More rows than a step of few ranks uses, for tables of a vocabulary (tests/support/table_cases.py).
NUM_IDS = 40
_MANY_IDS = {"vocab_size": NUM_IDS}

MODELS = {
    "toy": Model(_toy, _summed_cross_entropy),
    "stacks": Model(_stacked, _summed_cross_entropy, _with_stacks(_stacked())),
    "llama tied": _decoder_model(LLAMA, tied_embeddings=True),
    "gpt2": _decoder_model(GPT2),
    "gpt_neox": _decoder_model(NEOX),
    "wide llama, 1 kv head": _decoder_model(LLAMA | WIDE | {"num_key_value_heads": 1}),
    "wide llama, 2 kv heads": _decoder_model(LLAMA | WIDE, tied_embeddings=True, attention_bias=True),
    "wide llama, 8 kv heads": _decoder_model(LLAMA | WIDE | {"num_key_value_heads": 8}),
    "wide qwen2, 1 kv head": _decoder_model(QWEN2 | WIDE | {"num_key_value_heads": 1}),
    "wide qwen3, 2 kv heads": _decoder_model(QWEN3 | WIDE),
    "wide llama, window": _decoder_model(LLAMA | WIDE, sliding_window=3),
    "wide smollm3": _decoder_model(SMOLLM3 | WIDE),
    "wide granite": _decoder_model(GRANITE | WIDE),
    "wide olmo2": _decoder_model(LLAMA | WIDE | {"model_type": "olmo2"}),
    "wide olmo2, 1 kv head": _decoder_model(LLAMA | WIDE | {"model_type": "olmo2", "num_key_value_heads": 1}),
    "wide phi3": _decoder_model(LLAMA | WIDE | {"model_type": "phi3", "sliding_window": 4}),
    "wide gemma2": _decoder_model(GEMMA2 | WIDE),
    "wide gemma3": _decoder_model(GEMMA3 | WIDE),
    "wide gpt2": _decoder_model(WIDE_GPT2),
    "wide gpt_neox": _decoder_model(NEOX | WIDE),
    "llama, frozen layer": _decoder_model(LLAMA, FROZEN_LAYER, tied_embeddings=True),
    "llama, frozen table": _decoder_model(LLAMA, ("embedding.*",), tied_embeddings=True),
    "deep llama tied": _decoder_model(LLAMA | DEEP, tied_embeddings=True),
    "deep gpt2": _decoder_model(GPT2 | {"n_layer": 6}),
    "deep gpt_neox": _decoder_model(NEOX | DEEP),
    "deep llama, frozen layer": _decoder_model(LLAMA | DEEP, FROZEN_LAYER, tied_embeddings=True),
    "deep llama, frozen table": _decoder_model(LLAMA | DEEP, ("embedding.*",), tied_embeddings=True),
    "mixture tied": _decoder_model(LLAMA, tied_embeddings=True, experts=_MIXTURE),
    "mixture, grouped": _decoder_model(QWEN3, experts=_GROUPED),
    "mixture, shared expert": _decoder_model(QWEN2, experts=_SHARED),
    "mixture, frozen experts": _decoder_model(LLAMA, _FROZEN_EXPERTS, experts=_SHARED),
    "deep mixture tied": _decoder_model(LLAMA | DEEP, tied_embeddings=True, experts=_GROUPED),
    "wide mixture": _decoder_model(LLAMA | WIDE, tied_embeddings=True, experts=_GROUPED),
    "wide mixture, window": _decoder_model(LLAMA | WIDE, sliding_window=3, experts=_SHARED),
    "llama of sixteens": _decoder_model(LLAMA | SIXTEENS, attention_bias=True),
    "deep llama of sixteens": _decoder_model(LLAMA | SIXTEENS | DEEP, tied_embeddings=True),
    "mixture of sixteens": _decoder_model(
        LLAMA | SIXTEENS, experts=replace(_EXPERTS, intermediate_size=16, shared_size=16, shared_gate=True)
    ),
    "wide mixture of sixteens": _decoder_model(LLAMA | SIXTEENS, experts=replace(_EXPERTS, intermediate_size=32)),
    "thin mixture of sixteens": _decoder_model(LLAMA | SIXTEENS, experts=_EXPERTS),
    "llama values": _decoder_model(LLAMA, tied_embeddings=True, scalar_head=True),
    "gpt2 values": _decoder_model(GPT2, scalar_head=True),
    "experts": _decoder_model(LLAMA, tied_embeddings=True, experts=_EXPERTS),
    "wide experts": _decoder_model(
        LLAMA | WIDE, tied_embeddings=True, experts=replace(_EXPERTS, shared_size=6, shared_gate=True)
    ),
    "experts in groups": _decoder_model(
        LLAMA | {"num_hidden_layers": 3}, experts=replace(_EIGHT_GROUPED, shared_size=6, dense_layers=(0,))
    ),
    "one of many experts": _decoder_model(LLAMA, experts=replace(_EXPERTS, per_token=1)),
    "one scaled expert, sigmoid": _decoder_model(
        LLAMA, experts=replace(_EXPERTS, per_token=1, gate="sigmoid", scale=2.5)
    ),
    "one scaled expert, softmax": _decoder_model(
        LLAMA, experts=replace(_EXPERTS, per_token=1, normalized=False, scale=2.5)
    ),
    "one expert for all": _decoder_model(  # the first: no router tells experts apart
        LLAMA, ("layers.*.mlp.router.weight",), "router.weight", experts=replace(_EXPERTS, per_token=1)
    ),
    "all experts": _decoder_model(LLAMA, experts=replace(_EXPERTS, per_token=8)),
    "experts, noisy": _decoder_model(LLAMA, experts=replace(_EXPERTS, gate="noisy")),
    "experts, cosine": _decoder_model(
        LLAMA, tied_embeddings=True, experts=replace(_EXPERTS, gate="cosine", router_size=3)
    ),
    "experts choose": _decoder_model(
        LLAMA, experts=replace(_EXPERTS, gate="expert_choice", normalized=False, shared_size=6)
    ),
    "deep experts, noisy": _decoder_model(
        LLAMA | DEEP, tied_embeddings=True, experts=replace(_EXPERTS, gate="noisy", dense_layers=(2,))
    ),
    "deep experts choose": _decoder_model(
        LLAMA | DEEP, experts=replace(_EXPERTS, gate="expert_choice", normalized=False, dense_layers=(0,))
    ),
    "experts, even": _decoder_model(LLAMA, experts=replace(_EXPERTS, per_token=3, route="even")),
    "latent": _decoder_model(LATENT),
    "wide latent": _decoder_model(LATENT | WIDE | {"num_key_value_heads": 8, "q_lora_rank": None}, experts=None),
    "dense latent": _decoder_model(LATENT, experts=None),
    "deep latent": _decoder_model(LATENT | DEEP, tied_embeddings=True),
    "further, latent": _further(LATENT | {"num_nextn_predict_layers": 1}),
    "further, two": _further(GLM | {"num_nextn_predict_layers": 2}),
    "deep further": _further(GLM | DEEP | {"num_nextn_predict_layers": 1}, tied_embeddings=True),
    "sunk": _decoder_model(SUNK),
    "wide sunk": _decoder_model(SUNK | WIDE, tied_embeddings=True),
    "wide sunk, 1 kv head": _decoder_model(SUNK | WIDE | {"num_key_value_heads": 1}),
    "deep sunk": _decoder_model(SUNK | DEEP, tied_embeddings=True),
    "deep sunk, frozen parts": _decoder_model(SUNK | DEEP, FROZEN_SINKS, tied_embeddings=True),
    "linear": _decoder_model(LINEAR),
    "wide linear": _decoder_model(LINEAR | WIDE | {"linear_num_value_heads": 8, "linear_num_key_heads": 4}),
    "deep linear": _decoder_model(LINEAR | DEEP, tied_embeddings=True),
    "linear alone": _decoder_model(LINEAR | {"layer_types": ["linear_attention"] * 2}),
    "linear experts": _decoder_model(NEXT),
    "kimi": _decoder_model(KIMI),
    "deep kimi": _decoder_model(KIMI | DEEP | {"layer_types": None}),
    "llama, many ids": _decoder_model(LLAMA | _MANY_IDS),
    "gpt2, many ids": _decoder_model(GPT2 | _MANY_IDS, tied_embeddings=False),
    "llama, many frozen ids": _decoder_model(LLAMA | _MANY_IDS, ("embedding.*",)),
    "deep llama, many ids": _decoder_model(LLAMA | DEEP | _MANY_IDS),
    "experts, many ids": _decoder_model(LLAMA | _MANY_IDS, experts=_EXPERTS),
    "deep experts": _decoder_model(LLAMA | DEEP, tied_embeddings=True, experts=replace(_EXPERTS, dense_layers=(2,))),
}


def run_blocks(blocks: Sequence[nn.Module], tokens: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits (B, S, V) of tokens (B, S), at `positions` (B, S) if given."""
    x = tokens
    for block in blocks:
        x = block(x) if positions is None else block(x, positions)
    return x


def count_tokens(labels: Tensor) -> Tensor:
    """Number of labels (B, S) that have a target, an int64 scalar."""
    return (labels != IGNORE_INDEX).sum()


def make_batch(step: int, batch: int, sequence: int = SEQUENCE) -> tuple[Tensor, Tensor]:
    """Tokens and labels (batch, sequence) of one step of the whole world; some labels are ignored."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (batch, sequence), generator=generator)
    labels = tokens.roll(-1, dims=1)
    labels[0, :3] = -100
    if batch > 2:
        labels[2] = -100
    return tokens, labels


@dataclass(frozen=True)
class Rows:
    """Rows of `sequence` tokens; row i holds documents of the lengths `documents[i % ...]`, or is one document."""

    sequence: int = SEQUENCE
    documents: tuple[tuple[int, ...], ...] = ()

    def lengths(self, row: int) -> tuple[int, ...]:
        """Lengths of the documents in a row of the global batch."""
        return self.documents[row % len(self.documents)] if self.documents else (self.sequence,)

    def batch(self, step: int, num_rows: int) -> Batch:
        """Tokens, labels, places and, where there are documents, positions (num_rows, sequence)."""
        tokens, labels = make_batch(step, num_rows, self.sequence)
        numbers = torch.arange(step * num_rows, (step + 1) * num_rows)
        if not self.documents:
            return Batch(tokens, labels, places=places_of(numbers, labels))
        positions = torch.zeros_like(tokens)
        for row in range(num_rows):
            assert sum(self.lengths(row)) == self.sequence
            end = 0
            for size in self.lengths(row):
                positions[row, end : end + size] = torch.arange(size)
                end += size
                labels[row, end - 1] = -100  # the next token is of another document
        return Batch(tokens, labels, positions, places=places_of(numbers, labels, positions))

    def apart(self, tokens: Tensor, labels: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Every document alone; rows that are one document, together."""
        if not self.documents:
            yield tokens, labels
            return
        for row in range(len(tokens)):
            sizes = list(self.lengths(row))
            for x, y in zip(torch.split(tokens[row], sizes), torch.split(labels[row], sizes), strict=True):
                yield x[None], y[None]


WHOLE_ROWS = Rows()


def with_wires(cluster: Cluster, plan: Plan, name: str) -> Plan:
    """Return the plan with every message in one format, wherever it crosses."""
    layout = Layout.written(cluster, plan)
    table = {message.value: {layout.tiers[tier]: name for tier in layout.route(message)} for message in PLACEABLE}
    return replace(plan, wire=table)
