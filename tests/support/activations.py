"""Tiny models whose activations are measured."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from terrace.model.config import parse_model
from terrace.simulate.activations import BlockActivations, block_activation_bytes
from terrace.simulate.block_tape import Backend
from terrace.simulate.work import Work

VOCAB, HIDDEN, BATCH = 101, 64, 2
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
_LLAMA = _SIZES | {"model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 1, "n_head": 4, "n_positions": 512}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
MODELS = {
    "llama": parse_model(_LLAMA),
    "llama, all heads, wide": parse_model(_LLAMA | {"num_key_value_heads": 4, "intermediate_size": 224}),
    "llama, relu": parse_model(_LLAMA | {"hidden_act": "relu"}),
    "llama, parallel": replace(parse_model(_LLAMA), parallel_residual=True),
    "qwen2": parse_model(_LLAMA | {"model_type": "qwen2"}),
    "qwen3": parse_model(_LLAMA | {"model_type": "qwen3", "head_dim": 24}),
    "gpt_neox": parse_model(_SIZES | {"model_type": "gpt_neox", "intermediate_size": 256}),
    "gpt2": parse_model(GPT2),
    "gpt2, relu": parse_model(GPT2 | {"activation_function": "relu"}),
}

_LATENT: dict[str, Any] = _LLAMA | {"model_type": "deepseek_v3", "num_hidden_layers": 2, "num_key_value_heads": 4}
_LATENT |= {"q_lora_rank": 40, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 20}
_LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
_LATENT |= {"n_group": 1, "topk_group": 1}
_CHANGES: dict[str, dict[str, Any]] = {
    "latent": {},
    "latent, whole queries": {"q_lora_rank": None, "rope_interleave": False},
    "latent, values as long": {"v_head_dim": 24},
}
MODELS |= {
    name: replace(parse_model(_LATENT | change), num_layers=1, experts=None) for name, change in _CHANGES.items()
}

# Norms of outputs, multipliers and caps.
FAMILIES = {
    "gemma2": parse_model(_LLAMA | {"model_type": "gemma2", "head_dim": 24, "query_pre_attn_scalar": 9}),
    "gemma3_text": parse_model(_LLAMA | {"model_type": "gemma3_text", "head_dim": 16}),
    "granite": parse_model(
        _LLAMA | {"model_type": "granite", "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 3}
    ),
    "olmo2": parse_model(_LLAMA | {"model_type": "olmo2"}),
}


def layer_activations(work: Work, backend: Backend = "cuda") -> BlockActivations:
    """Activations of a layer of the model of `work`."""
    return block_activation_bytes(work, work.layer, backend)


def rotary_tables(block: nn.Module) -> list[Tensor]:
    rotary = getattr(getattr(block, "attention", None), "rotary", None)
    return [table for pair in rotary._tables.values() for table in pair] if rotary else []
