"""The Hugging Face `config.json` of each model family, and the meaning of its keys in Terrace.

A family is data: a table class with the keys Terrace implements as fields, with the defaults of `transformers`, the
names of these keys in `ModelConfig`, and the values fixed by the family. Every other key is either harmless
(`HARMLESS` of terrace.model.hf.keys, and the family's own), or accepted only with the value Terrace implements
(`ONLY`), or refused: no key is ignored by accident.

The defining sizes of a model (vocabulary, width, depth, heads) have defaults in `transformers` too, but are required
here: a forgotten key should not silently train a model of seven billion parameters.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
class _MixtureTable(_RotaryTable):
    # keys and defaults that families with experts share

    num_key_value_heads: int | None
    num_experts_per_tok: int
    rms_norm_eps: float = 1e-6
    route: str = "gate"  # Terrace's own


@dataclass(frozen=True, kw_only=True)
class _BalancedTable(_MixtureTable):
    # Their loss has a part of the router's if its logits are asked for. The gate is a key of Terrace's own.

    gate: str = "softmax"
    router_size: int = 0
    output_router_logits: bool = False
    router_aux_loss_coef: float = 0.001


@dataclass(frozen=True, kw_only=True)
class MixtralTable(_BalancedTable):
    num_local_experts: int
    head_dim: int | None = None
    max_position_embeddings: int = 4096 * 32
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class _QwenMoeTable(_BalancedTable):
    num_experts: int
    moe_intermediate_size: int
    max_position_embeddings: int = 32768
    norm_topk_prob: bool = False
    mlp_only_layers: tuple[int, ...] | None = None
    decoder_sparse_step: int = 1
    use_sliding_window: bool = False
    sliding_window: int | None = 4096


@dataclass(frozen=True, kw_only=True)
class Qwen2MoeTable(_QwenMoeTable):
    """The implemented keys of `Qwen2MoeConfig`. Without `layer_types` a window is in every other layer alone."""

    shared_expert_intermediate_size: int
    qkv_bias: bool = True
    max_window_layers: int = 28
    layer_types: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeTable(_QwenMoeTable):
    head_dim: int | None = None
    attention_bias: bool = False


@dataclass(frozen=True, kw_only=True)
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


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: how its keys become the fields of `ModelConfig`."""

    table: type[Any]
    architecture: str
    names: Mapping[str, str]  # field of ModelConfig -> key of the table; of its ExpertsConfig with "experts." in front
    constants: Mapping[str, object]  # fields the family does not let one choose
    implied: Mapping[str, object] = field(default_factory=dict)  # ONLY keys whose absence is not neutral
    written: Mapping[str, object] = field(default_factory=dict)  # keys that every table says alike
    aliases: Mapping[str, str] = field(default_factory=dict)  # another spelling of a key -> the key
    harmless: frozenset[str] = frozenset()  # more keys without effect on the next token
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # more keys with the values that it implements
    is_mixture: bool = False
    theta_key: str = ""  # where older files keep the RoPE base; empty: the family has no RoPE
    default_theta: float = 10000.0
    factor_key: str = ""  # where older files keep the rotated fraction of a head
    default_factor: float = 1.0
    factor_is_free: bool = False
    switched_window: bool = False  # whether sliding_window means something only with use_sliding_window
    is_scored: bool = True  # whether transformers has it with a score
    alternating_window: bool = False  # whether it means every other layer where layer_types is absent

    @property
    def scored_architecture(self) -> str:
        """The architecture with a score in place of the output matrix."""
        return re.sub("(ForCausalLM|LMHeadModel)$", "ForSequenceClassification", self.architecture)


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
_ROUTED = _GROUPED | {"experts.per_token": "num_experts_per_tok", "experts.route": "route"}
_GATES = {"experts.gate": "gate", "experts.router_size": "router_size"}
_QWEN_ROUTED = (_ROUTED | _GATES) | {
    "experts.num_experts": "num_experts",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
    "experts.dense_layers": "mlp_only_layers",
    "sliding_window": "sliding_window",
}

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
        # Absent keys would take the defaults of transformers.
        written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "mixtral": Family(
        table=MixtralTable,
        architecture="MixtralForCausalLM",
        names=_ROUTED
        | _GATES
        | {
            "head_dim": "head_dim",
            "sliding_window": "sliding_window",
            "experts.num_experts": "num_local_experts",
            "experts.intermediate_size": "intermediate_size",
        },
        constants=_GATED | {"attention_bias": False, "mlp_bias": False},
        aliases={"num_experts": "num_local_experts"},
        is_mixture=True,
        theta_key="rope_theta",
        default_theta=1e6,
    ),
    "qwen2_moe": Family(
        table=Qwen2MoeTable,
        architecture="Qwen2MoeForCausalLM",
        names=_QWEN_ROUTED | {"qkv_bias": "qkv_bias", "experts.shared_size": "shared_expert_intermediate_size"},
        constants=_GATED | {"attention_bias": False, "mlp_bias": False, "experts.shared_gate": True},
        is_mixture=True,
        theta_key="rope_theta",
        switched_window=True,
        alternating_window=True,
    ),
    "qwen3_moe": Family(
        table=Qwen3MoeTable,
        architecture="Qwen3MoeForCausalLM",
        names=_QWEN_ROUTED | _BIASED | {"head_dim": "head_dim"},
        constants=_GATED | {"mlp_bias": False, "qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        harmless=frozenset({"max_window_layers"}),
        # Qwen3-Coder's files say what the family is.
        only={"shared_expert_intermediate_size": (0,), "use_qk_norm": (True,), "qkv_bias": (False,)},
        is_mixture=True,
        theta_key="rope_theta",
        switched_window=True,
    ),
    "glm4_moe": Family(
        table=Glm4MoeTable,
        architecture="Glm4MoeForCausalLM",
        names=_ROUTED
        | {
            "head_dim": "head_dim",
            "qkv_bias": "attention_bias",
            "qk_norm": "use_qk_norm",
            "experts.num_experts": "n_routed_experts",
            "experts.intermediate_size": "moe_intermediate_size",
            "experts.normalized": "norm_topk_prob",
            "experts.scale": "routed_scaling_factor",
            "experts.num_groups": "n_group",
            "experts.kept_groups": "topk_group",
            "experts.shared_size": "n_shared_experts",
            "experts.dense_layers": "first_k_dense_replace",
        },
        constants=_GATED
        | {"attention_bias": False, "mlp_bias": False, "experts.gate": "sigmoid", "experts.biased": True},
        # A head for further tokens is no part of the next token, and is not written.
        written={"num_nextn_predict_layers": 0},
        aliases={"num_local_experts": "n_routed_experts", "num_mtp_layers": "num_nextn_predict_layers"},
        is_scored=False,
        harmless=frozenset({"num_nextn_predict_layers", "output_router_logits", "router_aux_loss_coef"}),
        is_mixture=True,
        theta_key="rope_theta",
        factor_key="partial_rotary_factor",
        default_factor=0.5,
        factor_is_free=True,
    ),
}
