"""Implemented keys of `config.json` for each model family, with the defaults of `transformers`.

terrace.model.hf.families maps them to `ModelConfig`. The main sizes of a model (vocabulary, width, depth, heads) are
required here although `transformers` has defaults for them: a missing key must not silently give a model of seven
billion parameters.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, dataclass_transform

ROOT_OF_HIDDEN = "root of hidden"  # value of a family's constant: embeddings are scaled by sqrt(H)
# Name in other families, and in transformers -> name in the released files of Kimi Linear
KIMI_KEYS = {
    "max_position_embeddings": "model_max_length",
    "num_experts_per_tok": "num_experts_per_token",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_shared_experts": "num_shared_experts",
    **dict.fromkeys(("num_local_experts", "n_routed_experts"), "num_experts"),
}

_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True, kw_only_default=True)
def _table(cls: _Class) -> _Class:
    # `made` makes the dataclass when a model of the family is read: making all at import takes longer than reading one.
    return cls


def made(cls: type[Any]) -> type[Any]:
    """Make a table of this module and its bases frozen dataclasses with keyword arguments, once; returns the table."""
    for each in reversed(cls.__mro__[:-1]):
        if "__dataclass_fields__" not in vars(each):
            dataclass(frozen=True, kw_only=True)(each)
    return cls


@_table
class _SizedTable:
    # keys and defaults that all families with rotary positions share

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    initializer_range: float = 0.02


@_table
class _RotaryTable(_SizedTable):
    # the same for all but Gemma

    max_position_embeddings: int = 2048
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False


@_table
class LlamaTable(_RotaryTable):
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    mlp_bias: bool = False


@_table
class MistralTable(_RotaryTable):
    num_key_value_heads: int | None
    head_dim: int | None = None
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-6
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None


@_table
class Qwen2Table(_RotaryTable):
    """The implemented keys of `Qwen2Config`, with its defaults. The first `max_window_layers` have no window."""

    num_key_value_heads: int | None
    max_position_embeddings: int = 32768
    rms_norm_eps: float = 1e-6
    use_sliding_window: bool = False
    sliding_window: int | None = 4096
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


@_table
class Qwen3Table(Qwen2Table):
    head_dim: int | None = 128
    attention_bias: bool = False


@_table
class SmolLM3Table(LlamaTable):
    num_key_value_heads: int | None = 4
    max_position_embeddings: int = 32768
    tie_word_embeddings: bool = True
    use_sliding_window: bool = False
    sliding_window: int | None = None
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    layer_types: tuple[str, ...] | None = None


@_table
class GraniteTable(LlamaTable):
    embedding_multiplier: float = 1.0
    logits_scaling: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0


@_table
class Olmo2Table(_RotaryTable):
    num_key_value_heads: int | None = None
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False


@_table
class Phi3Table(_RotaryTable):
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 4096
    original_max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None


@_table
class _GemmaTable(_SizedTable):
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int = 8192
    hidden_activation: str = "gelu_pytorch_tanh"
    tie_word_embeddings: bool = True
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    query_pre_attn_scalar: float = 256.0
    sliding_window: int | None = 4096
    layer_types: tuple[str, ...] | None = None


@_table
class Gemma2Table(_GemmaTable):
    attn_logit_softcapping: float | None = 50.0
    final_logit_softcapping: float | None = 30.0


@_table
class Gemma3Table(_GemmaTable):
    max_position_embeddings: int = 131072
    sliding_window_pattern: int = 6
    final_logit_softcapping: float | None = None


@_table
class GPTNeoXTable(_RotaryTable):
    layer_norm_eps: float = 1e-5
    hidden_act: str = "gelu"
    use_parallel_residual: bool = True
    attention_bias: bool = True


@_table
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


@_table
class _MixtureTable(_RotaryTable):
    # keys and defaults that families with experts share

    num_key_value_heads: int | None
    num_experts_per_tok: int
    rms_norm_eps: float = 1e-6
    route: str = "gate"  # Terrace's own


@_table
class _BalancedTable(_MixtureTable):
    # transformers adds a router loss if output_router_logits is set. The gate is a key of Terrace only.

    gate: str = "softmax"
    router_size: int = 0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


@_table
class MixtralTable(_BalancedTable):
    num_local_experts: int
    head_dim: int | None = None
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None


@_table
class _QwenMoeTable(_BalancedTable):
    num_experts: int
    moe_intermediate_size: int
    max_position_embeddings: int = 32768
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: int = 1
    use_sliding_window: bool = False
    sliding_window: int | None = 4096


@_table
class Qwen2MoeTable(_QwenMoeTable):
    """The implemented keys of `Qwen2MoeConfig`. Without `layer_types` only every other layer has a window."""

    shared_expert_intermediate_size: int
    qkv_bias: bool = True
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


@_table
class Qwen3MoeTable(_QwenMoeTable):
    head_dim: int | None = None
    attention_bias: bool = False


@_table
class _LinearTable:
    # keys of linear layers; every full_attention_interval-th layer has full attention

    linear_num_key_heads: int
    linear_num_value_heads: int
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    head_dim: int | None = 256
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    layer_types: tuple[str, ...] | None = None


@_table
class Qwen3NextTable(_LinearTable, _QwenMoeTable):
    shared_expert_intermediate_size: int
    norm_topk_prob: bool = True


@_table
class Qwen35Table(_LinearTable, _RotaryTable):
    """The implemented keys of `Qwen3_5TextConfig`."""

    num_key_value_heads: int
    rms_norm_eps: float = 1e-6


@_table
class Qwen35MoeTable(_LinearTable, _BalancedTable):
    """The implemented keys of `Qwen3_5MoeTextConfig`, whose layers all have experts."""

    intermediate_size: ClassVar[None] = None  # type: ignore[misc]  # no key here: there is no MLP beside the experts
    num_experts: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int


@_table
class Glm4MoeTable(_MixtureTable):
    n_routed_experts: int
    moe_intermediate_size: int
    head_dim: int | None = None
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    use_qk_norm: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    n_shared_experts: int = 1
    first_k_dense_replace: int = 1
    num_nextn_predict_layers: int = 0


@_table
class GptOssTable(_MixtureTable):
    """The implemented keys of `GptOssConfig`. Without `layer_types` every other layer has a window."""

    num_local_experts: int
    head_dim: int | None = 64
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = True
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


@_table
class DeepseekV3Table(_MixtureTable):
    """The implemented keys of `DeepseekV3Config`; sizes of attention and experts have no defaults here."""

    n_routed_experts: int
    moe_intermediate_size: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    rope_interleave: bool = True
    max_position_embeddings: int = 4096
    attention_bias: bool = False
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    n_group: int = 8
    topk_group: int = 4
    n_shared_experts: int = 1
    first_k_dense_replace: int = 3
    num_nextn_predict_layers: int = 0


@_table
class KimiLinearTable(_SizedTable):
    """The implemented keys of `KimiLinearConfig`, under the names of released files.

    Without `layer_types`, layers 4, 8, ... have attention, counted from 0, and the others are linear.
    """

    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    num_key_value_heads: int | None = None
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    kv_lora_rank: int
    q_lora_rank: int | None = None
    qk_rope_head_dim: int
    qk_nope_head_dim: int
    v_head_dim: int
    linear_num_heads: int
    linear_head_dim: int
    linear_conv_kernel_dim: int = 4
    layer_types: tuple[str, ...] | None = None
    mlp_layer_types: tuple[str, ...] | None = None
    model_max_length: int = 1048576
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    num_expert_group: int = 1
    topk_group: int = 1
    num_shared_experts: int = 1
    first_k_dense_replace: int = 1
    route: str = "gate"  # Terrace's own
