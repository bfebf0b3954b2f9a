"""Small models of every family with random values, and their logits in `transformers` and here."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, load_model
from terrace.model.decoder import build_blocks
from tests.support.toys import run_blocks

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="logits are compared with those of transformers")

_SIZES: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
_SIZES |= {"max_position_embeddings": 40}
_LLAMA = _SIZES | {"intermediate_size": 37}
_LLAMA3: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
_LLAMA3 |= {"original_max_position_embeddings": 32}  # with heads of 12, frequencies of all three kinds
_LINEAR = {"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}
_GPT2: dict[str, Any] = {"vocab_size": 61, "n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 40}
_GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_ROUTED = _LLAMA | {"num_key_value_heads": 2, "num_experts_per_tok": 3}
_FINE = {"num_experts": 6, "moe_intermediate_size": 14}
_GLM: dict[str, Any] = _ROUTED | {"model_type": "glm4_moe", "head_dim": 12, "n_routed_experts": 6}
_GLM |= {"moe_intermediate_size": 14, "n_shared_experts": 2, "routed_scaling_factor": 1.5}
_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 500.0, "original_max_position_embeddings": 10}
_LONG: dict[str, Any] = {"rope_type": "longrope", "rope_theta": 700.0}
_LONG |= {"short_factor": [1.0, 1.1, 1.3], "long_factor": [1.0, 2.5, 4.0]}  # of heads of 6
_GEMMA = _LLAMA | {"num_key_value_heads": 2, "head_dim": 10, "query_pre_attn_scalar": 7}
_GEMMA |= {"hidden_size": 16, "sliding_window": 5}  # whose root is exact in fp32, as transformers keeps it
_LATENT: dict[str, Any] = _ROUTED | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 6}
_LATENT |= {"moe_intermediate_size": 14, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1, "kv_lora_rank": 10}
_LATENT |= {"q_lora_rank": 14, "qk_rope_head_dim": 4, "qk_nope_head_dim": 7, "v_head_dim": 9}
# gpt-oss-20b and -120b with fewer and smaller layers: heads, experts and windows in their proportions.
_OSS: dict[str, Any] = _SIZES | {"model_type": "gpt_oss", "intermediate_size": 24, "num_key_value_heads": 1}
_OSS |= {"head_dim": 8, "num_attention_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 4, "sliding_window": 5}
_OSS |= {"rope_parameters": _YARN | {"factor": 32.0, "truncate": False}, "pad_token_id": None}
# Qwen3-Next-80B-A3B and Qwen3.5 with fewer and smaller layers: heads in their proportions, three of four layers linear.
_NEXT: dict[str, Any] = _ROUTED | _FINE | {"model_type": "qwen3_next", "head_dim": 16, "num_hidden_layers": 4}
_NEXT |= {"shared_expert_intermediate_size": 17, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_NEXT |= {"linear_key_head_dim": 6, "linear_value_head_dim": 5}
_NEXT_DENSE = {key: value for key, value in _NEXT.items() if "expert" not in key and "moe" not in key}
_NEXT_DENSE |= {"model_type": "qwen3_5_text"}
# Keys of the released files that change nothing for text.
_NEXT_RELEASED = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mlp_only_layers": []}
_NEXT_RELEASED |= {"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}
_MROPE = {"mrope_interleaved": True, "mrope_section": [1, 1, 0], "rope_type": "default", "rope_theta": 10000.0}
_NEXT_RELEASED |= {"rope_parameters": _MROPE | {"partial_rotary_factor": 0.25}}
# Qwen3.5-35B-A3B with fewer and smaller layers: every layer has experts, whose weights are always normalised.
_NEXT_MIXED = {key: value for key, value in _NEXT.items() if key != "intermediate_size"}
_NEXT_MIXED |= {"model_type": "qwen3_5_moe_text"}
# Kimi-Linear-48B-A3B with fewer and smaller layers: the first of them dense, the last of them with attention.
_KIMI = {key: value for key, value in _LATENT.items() if key not in ("max_position_embeddings", "n_group")}
_KIMI |= {"model_type": "kimi_linear", "topk_group": 1, "num_hidden_layers": 4, "q_lora_rank": None, "num_experts": 6}
_KIMI |= {"num_experts_per_token": _KIMI.pop("num_experts_per_tok"), "model_max_length": 40, "linear_num_heads": 4}
_KIMI |= {"linear_head_dim": 6, "pad_token_id": None, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
del _KIMI["n_routed_experts"]
TABLES: dict[str, dict[str, Any]] = {
    "gpt_oss, 20b": _OSS,
    "gpt_oss, 120b": _OSS | {"num_hidden_layers": 3, "num_local_experts": 16, "num_key_value_heads": 2},
    "gpt_oss, odd sizes": _OSS
    | {"hidden_size": 21, "intermediate_size": 13, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6}
    | {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7, "attention_bias": False}
    | {"layer_types": ["full_attention", "sliding_attention"], "tie_word_embeddings": True},
    "smollm3": _LLAMA
    | {"model_type": "smollm3", "num_key_value_heads": 2, "no_rope_layers": [1, 0], "pad_token_id": None},
    "smollm3, window, untied": _LLAMA
    | {"model_type": "smollm3", "num_key_value_heads": 2, "no_rope_layer_interval": 2, "pad_token_id": None}
    | {"use_sliding_window": True, "sliding_window": 5, "tie_word_embeddings": False, "attention_bias": True},
    "granite": _LLAMA
    | {"model_type": "granite", "num_key_value_heads": 2, "embedding_multiplier": 12.0, "logits_scaling": 3.0}
    | {"residual_multiplier": 0.22, "attention_multiplier": 0.3},
    "olmo2": _LLAMA | {"model_type": "olmo2", "num_key_value_heads": 2, "pad_token_id": None},
    "phi3": _LLAMA | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": None, "sliding_window": 7},
    "phi3, longrope, short": _LLAMA
    | {"model_type": "phi3", "num_key_value_heads": 4, "pad_token_id": None, "original_max_position_embeddings": 20}
    | {"rope_parameters": _LONG, "tie_word_embeddings": True},
    "phi3, longrope, long, partial": _LLAMA
    | {"model_type": "phi3", "num_key_value_heads": 2, "pad_token_id": None, "original_max_position_embeddings": 11}
    | {"num_attention_heads": 3, "num_key_value_heads": 1}
    | {"rope_parameters": _LONG | {"partial_rotary_factor": 0.75}},
    "llama, yarn": _LLAMA | {"model_type": "llama", "rope_parameters": _YARN},
    "llama, yarn, mscale": _LLAMA
    | {"model_type": "llama", "head_dim": 12}
    | {"rope_parameters": _YARN | {"beta_fast": 4.0, "truncate": False, "mscale": 0.7, "mscale_all_dim": 1.3}},
    "llama, longrope": _LLAMA
    | {"model_type": "llama", "rope_parameters": _LONG | {"original_max_position_embeddings": 12}},
    "llama, dynamic, beyond": _LLAMA
    | {"model_type": "llama", "max_position_embeddings": 11}
    | {"rope_parameters": {"rope_type": "dynamic", "factor": 3.0, "rope_theta": 500.0}},
    "qwen3, half of the layers with a window": _LLAMA
    | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 10, "use_sliding_window": True}
    | {"sliding_window": 5, "max_window_layers": 1},
    "gemma2": _GEMMA
    | {"model_type": "gemma2", "attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "pad_token_id": None},
    "gemma3_text": _GEMMA
    | {"model_type": "gemma3_text", "sliding_window_pattern": 2, "pad_token_id": None, "rope_theta": 900.0}
    | {"rope_local_base_freq": 30.0, "rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    "gemma3_text, capped": _GEMMA
    | {"model_type": "gemma3_text", "pad_token_id": None, "final_logit_softcapping": 2.0, "num_key_value_heads": 4}
    | {"layer_types": ["full_attention", "sliding_attention"]},
    "llama": _LLAMA | {"model_type": "llama", "num_key_value_heads": 2},
    "llama, tied, biases": _LLAMA
    | {"model_type": "llama", "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
    "llama 3.1, 1 kv head": _LLAMA
    | {"model_type": "llama", "head_dim": 12, "num_key_value_heads": 1, "rope_parameters": _LLAMA3},
    "llama, linear": _LLAMA | {"model_type": "llama", "rope_parameters": _LINEAR},
    "mistral": _LLAMA | {"model_type": "mistral", "num_key_value_heads": 2, "head_dim": 10, "sliding_window": None},
    "mistral, window": _LLAMA | {"model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 7},
    "qwen2, window": _LLAMA
    | {"model_type": "qwen2", "num_key_value_heads": 2, "use_sliding_window": True, "sliding_window": 5}
    | {"max_window_layers": 0},
    "qwen2": _LLAMA | {"model_type": "qwen2", "num_key_value_heads": 2},
    "qwen2, tied": _LLAMA | {"model_type": "qwen2", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen3": _LLAMA | {"model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 10},
    "qwen3, biases": _LLAMA | {"model_type": "qwen3", "num_key_value_heads": 1, "head_dim": 6, "attention_bias": True},
    "gpt_neox": _SIZES | {"model_type": "gpt_neox", "intermediate_size": 50, "rotary_pct": 0.5, "hidden_size": 36},
    "gpt_neox, serial, tied, linear": _SIZES
    | {"model_type": "gpt_neox", "intermediate_size": 50, "use_parallel_residual": False, "tie_word_embeddings": True}
    | {"rope_parameters": _LINEAR | {"partial_rotary_factor": 1.0}, "attention_bias": False},
    "gpt2": _GPT2 | {"model_type": "gpt2"},
    "mixtral": _ROUTED | {"model_type": "mixtral", "num_local_experts": 6, "head_dim": 10},
    "mixtral, window, tied": _ROUTED
    | {"model_type": "mixtral", "num_local_experts": 3, "sliding_window": 7, "tie_word_embeddings": True},
    "qwen2_moe": _ROUTED | _FINE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 17},
    "qwen2_moe, every other layer, windows": _ROUTED
    | _FINE
    | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 17, "norm_topk_prob": True, "qkv_bias": False}
    | {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 5}
    | {"layer_types": ["sliding_attention"] * 2},
    "qwen3_moe": _ROUTED | _FINE | {"model_type": "qwen3_moe", "head_dim": 10, "mlp_only_layers": [0]},
    "qwen3_moe, biases, window": _ROUTED
    | _FINE
    | {"model_type": "qwen3_moe", "attention_bias": True, "norm_topk_prob": True}
    | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0},
    "glm4_moe": _GLM,
    "glm4_moe, groups, norms, biases": _GLM
    | {"n_group": 3, "topk_group": 2, "use_qk_norm": True, "attention_bias": True, "first_k_dense_replace": 0}
    | {"partial_rotary_factor": 1.0, "norm_topk_prob": False},
    "deepseek_v3": _LATENT,
    "deepseek_v3, yarn, biases": _LATENT
    | {
        "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 0.7},
        "attention_bias": True,
        "n_shared_experts": 2,
    },
    "deepseek_v3, whole queries, halves": _LATENT
    | {"q_lora_rank": None, "rope_interleave": False, "v_head_dim": 11, "n_group": 1, "topk_group": 1}
    | {"norm_topk_prob": False, "first_k_dense_replace": 0},
    "qwen3_next": _NEXT,
    "qwen3_next, odd sizes": _NEXT
    | {"hidden_size": 21, "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 3}
    | {"layer_types": ["full_attention", "linear_attention"], "num_hidden_layers": 2, "attention_bias": True}
    | {"linear_value_head_dim": 9, "mlp_only_layers": [1], "tie_word_embeddings": True},
    "qwen3_5_text": _NEXT_DENSE,
    "qwen3_5_text, released": _NEXT_DENSE | _NEXT_RELEASED,
    "qwen3_5_text, grouped by three": _NEXT_DENSE
    | {"linear_num_value_heads": 6, "full_attention_interval": 2, "rope_parameters": {"rope_type": "default"}}
    | {"rope_theta": 500.0, "partial_rotary_factor": 0.5, "tie_word_embeddings": True},
    "qwen3_5_moe_text, released": _NEXT_MIXED | _NEXT_RELEASED,
    "qwen3_5_moe_text, odd sizes": _NEXT_MIXED
    | {"hidden_size": 21, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "num_hidden_layers": 2}
    | {"layer_types": ["full_attention", "linear_attention"], "attention_bias": True, "tie_word_embeddings": True},
    "kimi_linear": _KIMI,
    "kimi_linear, odd sizes": _KIMI
    | {"hidden_size": 21, "num_attention_heads": 3, "num_key_value_heads": 3, "q_lora_rank": 8, "num_expert_group": 3}
    | {"topk_group": 2, "num_shared_experts": 2, "linear_num_heads": 5, "linear_head_dim": 7, "num_hidden_layers": 2}
    | {"linear_conv_kernel_dim": 3, "layer_types": ["full_attention", "linear_attention"], "first_k_dense_replace": 0}
    | {"moe_renormalize": False, "attention_bias": True},
    "gpt2, untied": _GPT2 | {"model_type": "gpt2", "tie_word_embeddings": False, "n_inner": 31},
}
TOKENS = torch.randint(0, 61, (3, 19), generator=torch.Generator().manual_seed(0))
WITHIN = {torch.float32: 1e-5, torch.float64: 1e-10}


class Wide(TorchFunctionMode):
    """Keeps fp64 where `transformers` goes through fp32, in its rms norms and rotary positions."""

    def __torch_function__(self, function: Any, _: Any, given: Any = (), options: Any = None) -> Any:
        options = {key: torch.float64 if value is torch.float32 else value for key, value in (options or {}).items()}
        given = tuple(torch.float64 if value is torch.float32 else value for value in given)
        return function(*given, **options) if function is not torch.Tensor.float else given[0].double()


@contextmanager
def in_fp64() -> Iterator[None]:
    """Have `transformers` compute everything in fp64, quotients of integers too."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with Wide():
            yield
    finally:
        torch.set_default_dtype(before)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model that `transformers` loads from a folder."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    config = load_model(str(folder))
    if config.scales.attention_cap or config.has_sinks:
        options["attn_implementation"] = "eager"  # no other caps scores, or has sinks
    if config.experts is not None:
        options["experts_implementation"] = "eager"  # the others refuse fp64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.to(dtype) if config.delta.rank else model  # all of it: gradients of what is kept in fp32 too


def their_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    """Logits of the model that `transformers` loads from a folder."""
    if dtype is not torch.float64:
        return _logits(loaded(folder, dtype))
    with in_fp64():
        return _logits(loaded(folder, dtype))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(TOKENS).logits
    return logits


def randomise(parameters: Any) -> None:
    """Give every parameter values of its own: norms and biases too."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0.0, 0.25, generator=generator)


def their_model(folder: Path, table: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Have `transformers` make a model with random values, and save it."""
    config = transformers.AutoConfig.for_model(**table)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    randomise(model.parameters())
    kept = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(kept):  # as in a model that was loaded
                parameter.copy_(parameter.float())
    for module in model.modules():
        if hasattr(module, "e_score_correction_bias"):
            # As in a model that was loaded: in fp32.
            module.e_score_correction_bias = torch.linspace(-0.3, 0.3, len(module.e_score_correction_bias))
    model.save_pretrained(folder, **options)


@torch.no_grad()
def our_logits(config: ModelConfig, value: Callable[[str, str], Tensor], dtype: torch.dtype) -> Tensor:
    """Logits of this decoder with these values."""
    blocks = build_blocks(config, "cpu", dtype)
    for spec, block in zip(block_specs(config), blocks, strict=True):
        for param in spec.params:
            block.get_parameter(param.name).copy_(value(spec.name, param.name))
    return run_blocks(blocks, TOKENS)


def our_values(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Callable[[str, str], Tensor]:
    """Random values of every parameter."""
    shapes = {(block.name, param.name): param.shape for block in block_specs(config) for param in block.params}
    values = {key: nn.Parameter(torch.empty(shape, dtype=dtype)) for key, shape in shapes.items()}
    randomise(values.values())
    return lambda block, param: values[block, param].detach()
