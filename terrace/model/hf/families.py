"""The Hugging Face `config.json` of each model family, and the meaning of its keys in Terrace.

A family is data: a table class with the keys Terrace implements as fields, with the defaults of `transformers`, the
names of these keys in `ModelConfig`, and the values fixed by the family. Every other key is either harmless
(`HARMLESS`), or accepted only with the value Terrace implements (`ONLY`), or refused: no key is ignored by accident.

The defining sizes of a model (vocabulary, width, depth, heads) have defaults in `transformers` too, but are required
here: a forgotten key should not silently train a model of seven billion parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys that do not change the next-token function or its gradient.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _name_or_path architectures attn_implementation bad_words_ids
bos_token_id chunk_size_feed_forward classifier_dropout decoder_start_token_id do_sample dtype early_stopping
eos_token_id finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder
is_llama_config label2id length_penalty max_length min_length model_type n_ctx name_or_path no_repeat_ngram_size
num_beams num_labels num_return_sequences output_attentions output_hidden_states pad_token_id prefix pretraining_tp
problem_type repetition_penalty return_dict return_dict_in_generate sep_token_id summary_activation
summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params
temperature tokenizer_class top_k top_p torch_dtype torchscript transformers.js_config transformers_version
typical_p unk_token_id unsloth_fixed unsloth_version use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())

# Keys that change the mathematics, with the values Terrace implements. `None` is JSON's null.
_DROPOUTS = """
resid_pdrop embd_pdrop attn_pdrop attention_dropout hidden_dropout attention_probs_dropout_prob hidden_dropout_prob
"""
DROPOUTS = tuple(_DROPOUTS.split())
ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(DROPOUTS, (0.0, None)),
    "quantization_config": (None,),
    "use_mrope": (False,),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": ({}, None),
    "rope_interleaved": (False,),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
}

ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}


@dataclass(frozen=True, kw_only=True)
class _RotaryTable:
    # keys and defaults that all families with rotary positions share

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02


@dataclass(frozen=True, kw_only=True)
class LlamaTable(_RotaryTable):
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class MistralTable(_RotaryTable):
    num_key_value_heads: int | None
    head_dim: int | None = None
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen2Table(_RotaryTable):
    """The implemented keys of `Qwen2Config`, with its defaults. A window applies to all layers or to none."""

    num_key_value_heads: int | None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen3Table(Qwen2Table):
    head_dim: int | None = 128
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
class GPTNeoXTable(_RotaryTable):
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    use_parallel_residual: bool = True
    attention_bias: bool = True


@dataclass(frozen=True, kw_only=True)
class GPT2Table:
    vocab_size: int
    n_embd: int
    n_layer: int
    n_head: int
    n_inner: int | None = None
    n_positions: int = 1024
    layer_norm_epsilon: float = 1e-5
    activation_function: str = "gelu_new"
    tie_word_embeddings: bool = True
    initializer_range: float = 0.02


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: how its keys become the fields of `ModelConfig`."""

    table: type[Any]
    architecture: str
    names: Mapping[str, str]  # field of ModelConfig -> key of the table
    constants: Mapping[str, object]  # fields the family does not let one choose
    implied: Mapping[str, object] = field(default_factory=dict)  # ONLY keys whose absence is not neutral
    theta_key: str = ""  # where older files keep the RoPE base; empty: the family has no RoPE
    factor_key: str = ""  # where older files keep the rotated fraction of a head
    default_factor: float = 1.0
    factor_is_free: bool = False
    switched_window: bool = False  # whether sliding_window means something only with use_sliding_window


_SHARED_NAMES = {
    "vocab_size": "vocab_size",
    "tied_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_ROTARY_NAMES = _SHARED_NAMES | {
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "intermediate_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
}
_BIASED = {"attention_bias": "attention_bias"}
_GROUPED = _ROTARY_NAMES | {"num_kv_heads": "num_key_value_heads", "norm_eps": "rms_norm_eps"}
_GATED = {"norm": "rms", "gated_mlp": True, "parallel_residual": False}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        table=LlamaTable,
        architecture="LlamaForCausalLM",
        names=_GROUPED | _BIASED | {"head_dim": "head_dim", "mlp_bias": "mlp_bias"},
        constants=_GATED,
        theta_key="rope_theta",
    ),
    "mistral": Family(
        table=MistralTable,
        architecture="MistralForCausalLM",
        names=_GROUPED | {"head_dim": "head_dim", "sliding_window": "sliding_window"},
        constants=_GATED | {"attention_bias": False, "mlp_bias": False},
        theta_key="rope_theta",
    ),
    "qwen2": Family(
        table=Qwen2Table,
        architecture="Qwen2ForCausalLM",
        names=_GROUPED | {"sliding_window": "sliding_window"},
        constants=_GATED | {"attention_bias": False, "qkv_bias": True, "mlp_bias": False},
        theta_key="rope_theta",
        switched_window=True,
    ),
    "qwen3": Family(
        table=Qwen3Table,
        architecture="Qwen3ForCausalLM",
        names=_GROUPED | _BIASED | {"head_dim": "head_dim", "sliding_window": "sliding_window"},
        constants=_GATED | {"mlp_bias": False, "qk_norm": True},
        theta_key="rope_theta",
        switched_window=True,
    ),
    "gpt_neox": Family(
        table=GPTNeoXTable,
        architecture="GPTNeoXForCausalLM",
        names=_ROTARY_NAMES | _BIASED | {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
        constants={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        theta_key="rotary_emb_base",
        factor_key="rotary_pct",
        default_factor=0.25,
        factor_is_free=True,
    ),
    "gpt2": Family(
        table=GPT2Table,
        architecture="GPT2LMHeadModel",
        names=_SHARED_NAMES
        | {
            "hidden_size": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_positions": "n_positions",
            "norm_eps": "layer_norm_epsilon",
            "activation": "activation_function",
        },
        constants={
            "norm": "layer",
            "gated_mlp": False,
            "parallel_residual": False,
            "attention_bias": True,
            "mlp_bias": True,
        },
        implied={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
    ),
}
