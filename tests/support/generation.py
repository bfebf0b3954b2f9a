"""Tiny models with values, for generation and evaluation."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from terrace.generation.engine import GenerationEngine
from terrace.generation.request import Request, Sampling
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import ExpertsConfig
from terrace.model.init import initialise
from terrace.model.kinds import LayerKind, Scales
from terrace.model.rope_scaling import RopeScaling

VOCAB = 257
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 32,
}
NEOX = {**_LLAMA, "model_type": "gpt_neox", "rotary_pct": 0.5}
del NEOX["num_key_value_heads"]
_GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {"llama": parse_model(_LLAMA), "gpt_neox": parse_model(NEOX), "gpt2": parse_model(_GPT2)}
MODELS["window"] = replace(MODELS["llama"], sliding_window=5)
MODELS["one head of keys"] = replace(MODELS["llama"], num_kv_heads=1)
MODELS["normed heads"] = replace(MODELS["llama"], qk_norm=True, family="qwen3")
_EXPERTS = ExpertsConfig(num_experts=6, per_token=2, intermediate_size=12)
MODELS["mixtral"] = replace(MODELS["llama"], family="mixtral", intermediate_size=12, experts=_EXPERTS)
_GROUPS = replace(_EXPERTS, gate="sigmoid", num_groups=3, kept_groups=2, biased=True, shared_size=24, dense_layers=(0,))
MODELS["glm4_moe"] = replace(MODELS["llama"], family="glm4_moe", rotary_dim=2, experts=_GROUPS)
_KINDS = (LayerKind(sliding_window=5, rope_theta=100.0), LayerKind(rope_theta=1e4))
_GEMMA: dict[str, Any] = {"norms": "both", "norm_offset": True, "qk_norm": True, "kinds": _KINDS}
_CAPS = Scales(embedding=4.0, attention=0.6, attention_cap=0.3, logit_cap=2.0)
MODELS["windows by layer, capped"] = replace(MODELS["llama"], **_GEMMA, scales=_CAPS)
_SCALES = Scales(embedding=3.0, residual=0.4, attention=0.3, logit_divisor=2.0)
MODELS["norms after, scaled"] = replace(
    MODELS["llama"], family="olmo2", norms="after", qk_norm=True, whole_qk_norm=True, scales=_SCALES
)
_PAIR = (LayerKind(sliding_window=5, rope_theta=1e4), LayerKind(sliding_window=3))
MODELS["two windows"] = replace(MODELS["llama"], family="smollm3", sliding_window=5, kinds=_PAIR)
_LONG = RopeScaling(rope_type="longrope", original_max_position_embeddings=12, short_factor=(1, 2), long_factor=(3, 4))
MODELS["longrope"] = replace(MODELS["llama"], rope_scaling=_LONG)

_LATENT = _LLAMA | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_group": 1}
_LATENT |= {"kv_lora_rank": 10, "q_lora_rank": 6, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
_LATENT |= {"n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "topk_group": 1}
MODELS["latent"] = parse_model(_LATENT)
_SUNK = _LLAMA | {"model_type": "gpt_oss", "head_dim": 4, "num_local_experts": 6, "num_experts_per_tok": 2}
MODELS["sunk"] = parse_model(_SUNK | {"sliding_window": 5, "intermediate_size": 12})

_LINEAR = _LLAMA | {"model_type": "qwen3_5_text", "head_dim": 8, "num_hidden_layers": 4, "full_attention_interval": 2}
_LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 5,
}
MODELS["linear"] = parse_model(_LINEAR)
_KIMI = _LATENT | {"model_type": "kimi_linear", "q_lora_rank": None, "linear_num_heads": 4, "linear_head_dim": 6}
MODELS["kimi"] = parse_model(
    _KIMI | {"num_hidden_layers": 3, "layer_types": [*["linear_attention"] * 2, "full_attention"]}
)


def make(config: ModelConfig) -> list[nn.Module]:
    blocks = build_blocks(config, dtype=torch.float64)
    initialise(blocks, replace(config, init_std=0.3), seed=0, dtype=torch.float64)
    return blocks


def named(blocks: list[nn.Module]) -> dict[tuple[str, str], nn.Parameter]:
    """Every parameter by its block and name."""
    names = ["embedding", *(f"layers.{index}" for index in range(len(blocks) - 2)), "head"]
    pairs = zip(names, blocks, strict=True)
    return {(name, key): value for name, block in pairs for key, value in block.named_parameters()}


class Recorded(nn.Module):
    """A head that keeps the logits (B, V) of every pass."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head
        self.logits: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        self.logits.append(out[0])
        return out


def cached_logits(
    config: ModelConfig, blocks: Sequence[nn.Module], texts: Sequence[Sequence[int]], rows: int = 1
) -> Tensor:
    """Logits (2 texts, V): after every text, and after the likeliest next token of each; `blocks` on one of `rows`."""
    head = Recorded(blocks[-1])
    engine = GenerationEngine([*blocks[:-1], head], config, rows=rows, context=32, num_pages=64, page_tokens=4)
    greedy = Sampling(temperature=0.0)
    engine.run([Request(prompt=tuple(text), num_tokens=2, sampling=greedy) for text in texts])
    return torch.cat(head.logits)
