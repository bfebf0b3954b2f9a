"""Small models of every family with random values, and their logits in `transformers` and here."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from terrace.model.config import ModelConfig, block_specs, load_model
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
TABLES: dict[str, dict[str, Any]] = {
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


def their_logits(folder: Path, dtype: torch.dtype) -> Tensor:
    """Logits of what `transformers` loads from a folder."""
    options: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    if load_model(str(folder)).experts is not None:
        options["experts_implementation"] = "eager"  # the others refuse fp64
    if dtype is not torch.float64:
        return _logits(transformers.AutoModelForCausalLM.from_pretrained(folder, **options))
    with Wide():
        return _logits(transformers.AutoModelForCausalLM.from_pretrained(folder, **options))


@torch.no_grad()
def _logits(model: Any) -> Tensor:
    logits: Tensor = model.eval()(TOKENS).logits
    return logits


def randomise(parameters: Any) -> None:
    """Give every parameter values that tell it from every other: norms and biases too."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in parameters:
            parameter.normal_(0.0, 0.25, generator=generator)


def their_model(folder: Path, table: dict[str, Any], dtype: torch.dtype = torch.float64, **options: Any) -> None:
    """Have `transformers` make a model with random values, and save it."""
    config = transformers.AutoConfig.for_model(**table)
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
    randomise(model.parameters())
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


def contents(folder: Path) -> dict[str, bytes]:
    """Name and content of every file in a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}
