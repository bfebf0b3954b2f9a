"""Model families: how the keys of a Hugging Face `config.json` map to `ModelConfig`.

A family is data: the implemented keys (terrace.model.hf.key_tables), the `ModelConfig` fields of these
keys, and fields that are constant in the family. Every other key is harmless (`HARMLESS` of terrace.model.hf.keys, or
the family's own), or accepted only with the implemented value (`ONLY`), or rejected. No key is ignored by accident.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from terrace.model.hf.key_tables import (
    KIMI_KEYS,
    ROOT_OF_HIDDEN,
    DeepseekV3Table,
    Gemma2Table,
    Gemma3Table,
    Glm4MoeTable,
    GPT2Table,
    GPTNeoXTable,
    GptOssTable,
    GraniteTable,
    KimiLinearTable,
    LlamaTable,
    MistralTable,
    MixtralTable,
    Olmo2Table,
    Phi3Table,
    Qwen2MoeTable,
    Qwen2Table,
    Qwen3MoeTable,
    Qwen3NextTable,
    Qwen3Table,
    Qwen35MoeTable,
    Qwen35Table,
    SmolLM3Table,
    made,
)
from terrace.model.hf.keys import CLAMPED, NEXTN, NEXTN_ALIAS

# Which layers have the window if layer_types is missing: "": none, the family has no window; "all"; "after": those
# after the first max_window_layers; "alternating": every other one; "unrotated": those without RoPE; "pattern": all
# except every sliding_window_pattern-th.
WindowRule = Literal["", "all", "after", "alternating", "unrotated", "pattern"]


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type`: the mapping of its keys to the fields of `ModelConfig`."""

    keys: type[Any]  # a table of terrace.model.hf.key_tables
    architecture: str
    names: Mapping[str, str]  # field of ModelConfig -> key of the table; of its ExpertsConfig with "experts." in front
    constants: Mapping[str, object]  # fields with one value in the family
    implied: Mapping[str, object] = field(default_factory=dict)  # ONLY keys whose absence is not neutral
    written: Mapping[str, object] = field(default_factory=dict)  # keys with one value in every table
    absent: Mapping[str, object] = field(default_factory=dict)  # `rope_parameters` of a table without any
    packed: str = ""  # quant_method of weights that are read as plain floats
    aliases: Mapping[str, str] = field(default_factory=dict)  # another spelling of a key -> the key
    harmless: frozenset[str] = frozenset()  # more keys without effect on the next token
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # more keys with the values that it implements
    is_mixture: bool = False
    theta_key: str = "rope_theta"  # where older files keep the RoPE base; empty: the family has no RoPE
    learns_positions: bool = False
    default_theta: float = 10000.0
    factor_key: str = ""  # where older files keep the rotated fraction of a head
    default_factor: float = 1.0
    factor_is_free: bool = False
    local_theta_key: str = ""  # where older files keep the base of layers with a window, if theirs is another
    default_local_theta: float = 10000.0
    rope_types: tuple[str, ...] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    no_rope_key: str = ""  # the key that names layers without RoPE
    windows: WindowRule = ""
    mixes: bool = False  # whether layer_types may name both kinds
    names_kinds: bool = False  # whether layer_types are written even where all are alike
    is_scored: bool = True  # whether transformers has it with a scalar head

    @property
    def table(self) -> type[Any]:
        return made(self.keys)

    @property
    def scored_architecture(self) -> str:
        """Architecture with a scalar head instead of the output matrix."""
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
}
_LLAMA = Family(
    keys=LlamaTable,
    architecture="LlamaForCausalLM",
    names=_GROUPED | _BIASED | {"head_dim": "head_dim", "mlp_bias": "mlp_bias"},
    constants=_GATED,
)
_GEMMA2 = Family(
    keys=Gemma2Table,
    architecture="Gemma2ForCausalLM",
    names=_GROUPED | {"activation": "hidden_activation", "head_dim": "head_dim"} | _BIASED,
    constants=_GATED | {"mlp_bias": False, "norms": "both", "norm_offset": True, "scales.embedding": ROOT_OF_HIDDEN},
    only={"use_bidirectional_attention": (False, None)},
    # Alternative names in released files, which transformers does not read.
    harmless=frozenset({"hidden_act", "sliding_window_size", "_sliding_window_pattern"}),
    windows="pattern",
    mixes=True,
    names_kinds=True,
)
_SIGMOID_ROUTED = _ROUTED | {
    "experts.num_experts": "n_routed_experts",
    "experts.intermediate_size": "moe_intermediate_size",
    "experts.normalized": "norm_topk_prob",
    "experts.scale": "routed_scaling_factor",
    "experts.num_groups": "n_group",
    "experts.kept_groups": "topk_group",
    "experts.shared_size": "n_shared_experts",
    "experts.dense_layers": "first_k_dense_replace",
    "num_mtp_layers": NEXTN,
}
_SIGMOID = _GATED | {"mlp_bias": False, "experts.gate": "sigmoid", "experts.biased": True}
_SIGMOID_ALIASES = {"num_local_experts": "n_routed_experts", NEXTN_ALIAS: NEXTN}
_DEEPSEEK_V3 = Family(
    keys=DeepseekV3Table,
    architecture="DeepseekV3ForCausalLM",
    names=_SIGMOID_ROUTED | _BIASED,
    constants=_SIGMOID,
    aliases=_SIGMOID_ALIASES,
    is_mixture=True,
    # Released files have training settings and constants of the family; transformers also writes derived sizes.
    harmless=frozenset(
        {"aux_loss_alpha", "seq_aux", "ep_size", "auto_map", "output_router_logits"} | {"head_dim", "qk_head_dim"}
    ),
    only={"moe_layer_freq": (1,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
)
_HYBRID = _GATED | {"mlp_bias": False, "qk_norm": True, "norm_offset": True, "attention_gate": True}
_QUARTER: dict[str, Any] = {"factor_key": "partial_rotary_factor", "default_factor": 0.25, "factor_is_free": True}
_QWEN35 = Family(
    keys=Qwen35Table,
    architecture="Qwen3_5ForCausalLM",
    names=_GROUPED | _BIASED | {"head_dim": "head_dim"},
    constants=_HYBRID,
    # Released files say how other software keeps states, and name the heads that predict more tokens.
    harmless=frozenset({"mamba_ssm_dtype", "mlp_only_layers", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}),
    only={"attn_output_gate": (True,)},
    **_QUARTER,
)

FAMILIES: Mapping[str, Family] = {
    "llama": _LLAMA,
    "mistral": Family(
        keys=MistralTable,
        architecture="MistralForCausalLM",
        names=_GROUPED | {"head_dim": "head_dim"},
        constants=_GATED | {"attention_bias": False, "mlp_bias": False},
        windows="all",
    ),
    "qwen2": Family(
        keys=Qwen2Table,
        architecture="Qwen2ForCausalLM",
        names=_GROUPED,
        constants=_GATED | {"attention_bias": False, "qkv_bias": True, "mlp_bias": False},
        windows="after",
        mixes=True,
    ),
    "qwen3": Family(
        keys=Qwen3Table,
        architecture="Qwen3ForCausalLM",
        names=_GROUPED | _BIASED | {"head_dim": "head_dim"},
        constants=_GATED | {"mlp_bias": False, "qk_norm": True},
        windows="after",
        mixes=True,
    ),
    "smollm3": replace(
        _LLAMA,
        keys=SmolLM3Table,
        architecture="SmolLM3ForCausalLM",
        default_theta=2e6,
        harmless=frozenset({"max_window_layers"}),
        no_rope_key="no_rope_layers",
        windows="unrotated",
        mixes=True,
    ),
    "granite": replace(_LLAMA, keys=GraniteTable, architecture="GraniteForCausalLM", is_scored=False),
    "olmo2": Family(
        keys=Olmo2Table,
        architecture="Olmo2ForCausalLM",
        names=_GROUPED | _BIASED,
        constants=_GATED | {"mlp_bias": False, "qk_norm": True, "whole_qk_norm": True, "norms": "after"},
    ),
    "phi3": Family(
        keys=Phi3Table,
        architecture="Phi3ForCausalLM",
        names=_GROUPED,
        constants=_GATED | {"attention_bias": False, "mlp_bias": False},
        factor_key="partial_rotary_factor",
        factor_is_free=True,
        rope_types=("default", "longrope"),
        harmless=frozenset({"auto_map"}),
        # Keys in Phi-4-mini's files for features that it does not use.
        only={
            **dict.fromkeys(("attention_bias", "mlp_bias", "lm_head_bias"), (False,)),
            **dict.fromkeys(("full_attn_mod", "interpolate_factor"), (1,)),
        },
        windows="all",
    ),
    "gemma2": _GEMMA2,
    "gemma3_text": replace(
        _GEMMA2,
        keys=Gemma3Table,
        architecture="Gemma3ForCausalLM",
        constants={**_GEMMA2.constants, "qk_norm": True},
        only={**_GEMMA2.only, "attn_logit_softcapping": (None,)},
        default_theta=1e6,
        is_scored=False,
        local_theta_key="rope_local_base_freq",
    ),
    "gpt_neox": Family(
        keys=GPTNeoXTable,
        architecture="GPTNeoXForCausalLM",
        names=_ROTARY_NAMES | _BIASED | {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
        constants={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
        theta_key="rotary_emb_base",
        factor_key="rotary_pct",
        default_factor=0.25,
        factor_is_free=True,
    ),
    "gpt2": Family(
        keys=GPT2Table,
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
        theta_key="",
        learns_positions=True,
        implied={"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1},
        # Written explicitly, since the defaults of transformers differ.
        written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    ),
    "mixtral": Family(
        keys=MixtralTable,
        architecture="MixtralForCausalLM",
        names=_ROUTED
        | _GATES
        | {
            "head_dim": "head_dim",
            "experts.num_experts": "num_local_experts",
            "experts.intermediate_size": "intermediate_size",
        },
        constants=_GATED | {"attention_bias": False, "mlp_bias": False},
        aliases={"num_experts": "num_local_experts"},
        is_mixture=True,
        windows="all",
        default_theta=1e6,
    ),
    "qwen2_moe": Family(
        keys=Qwen2MoeTable,
        architecture="Qwen2MoeForCausalLM",
        names=_QWEN_ROUTED | {"qkv_bias": "qkv_bias", "experts.shared_size": "shared_expert_intermediate_size"},
        constants=_GATED | {"attention_bias": False, "mlp_bias": False, "experts.shared_gate": True},
        is_mixture=True,
        windows="alternating",
        mixes=True,
    ),
    "qwen3_moe": Family(
        keys=Qwen3MoeTable,
        architecture="Qwen3MoeForCausalLM",
        names=_QWEN_ROUTED | _BIASED | {"head_dim": "head_dim"},
        constants=_GATED | {"mlp_bias": False, "qk_norm": True},
        aliases={"num_local_experts": "num_experts"},
        harmless=frozenset({"max_window_layers"}),
        # Qwen3-Coder's files have keys for constants of the family.
        only={"shared_expert_intermediate_size": (0,), "use_qk_norm": (True,), "qkv_bias": (False,)},
        is_mixture=True,
        windows="after",
    ),
    "qwen3_next": Family(
        keys=Qwen3NextTable,
        architecture="Qwen3NextForCausalLM",
        names=_QWEN_ROUTED
        | _BIASED
        | {"head_dim": "head_dim", "experts.shared_size": "shared_expert_intermediate_size"},
        constants=_HYBRID | {"experts.shared_gate": True},
        aliases={"num_local_experts": "num_experts"},
        only={"use_sliding_window": (False,)},
        is_mixture=True,
        **_QUARTER,
    ),
    "qwen3_5_text": _QWEN35,
    "qwen3_5_moe_text": replace(
        _QWEN35,
        keys=Qwen35MoeTable,
        architecture="Qwen3_5MoeForCausalLM",
        # Weights are always divided by their sum, and every layer has experts.
        names={own: key for own, key in _QWEN_ROUTED.items() if key not in ("norm_topk_prob", "mlp_only_layers")}
        | _BIASED
        | {"head_dim": "head_dim", "intermediate_size": "moe_intermediate_size"}
        | {"experts.shared_size": "shared_expert_intermediate_size"},
        constants=_HYBRID | {"experts.shared_gate": True},
        only={**_QWEN35.only, "mlp_only_layers": ([], None)},
        is_mixture=True,
        is_scored=False,
    ),
    "glm4_moe": Family(
        keys=Glm4MoeTable,
        architecture="Glm4MoeForCausalLM",
        names=_SIGMOID_ROUTED | {"head_dim": "head_dim", "qkv_bias": "attention_bias", "qk_norm": "use_qk_norm"},
        constants=_SIGMOID | {"attention_bias": False},
        aliases=_SIGMOID_ALIASES,
        is_scored=False,
        harmless=frozenset({"output_router_logits", "router_aux_loss_coef"}),
        is_mixture=True,
        factor_key="partial_rotary_factor",
        default_factor=0.5,
        factor_is_free=True,
    ),
    "deepseek_v3": _DEEPSEEK_V3,
    "gpt_oss": Family(
        keys=GptOssTable,
        architecture="GptOssForCausalLM",
        names={name: key for name, key in _ROUTED.items() if name != "activation"}
        | _BIASED
        | {
            "head_dim": "head_dim",
            "experts.num_experts": "num_local_experts",
            "experts.intermediate_size": "intermediate_size",
        },
        constants=_GATED | {"mlp_bias": False, "has_sinks": True, "activation": CLAMPED, "experts.has_biases": True},
        written={"hidden_act": "silu", "swiglu_limit": 7.0},
        absent={"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False},
        packed="mxfp4",
        aliases={"num_experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
        # What its YaRN has under another name.
        harmless=frozenset({"initial_context_length"}),
        only={"hidden_act": ("silu",), "swiglu_limit": (7.0,), "swiglu_alpha": (1.702,)},
        is_mixture=True,
        default_theta=150000.0,
        windows="pattern",
        mixes=True,
        names_kinds=True,
    ),
    "kimi_linear": Family(
        keys=KimiLinearTable,
        architecture="KimiLinearForCausalLM",
        names={own: KIMI_KEYS.get(key, key) for own, key in _SIGMOID_ROUTED.items() if key != NEXTN} | _BIASED,
        constants=_SIGMOID,
        aliases=KIMI_KEYS,
        is_mixture=True,
        is_scored=False,
        theta_key="",
        # Derived sizes, and RoPE that no layer applies.
        harmless=frozenset(["head_dim", "qk_head_dim", "auto_map", "output_router_logits"])
        | {"rope_theta", "rope_parameters", "rope_scaling"},
        only={
            **_DEEPSEEK_V3.only,
            NEXTN: (0,),
            "mla_use_nope": (True,),
            "tie_word_embeddings": (False,),  # transformers ties nothing here
            "moe_router_activation_func": ("sigmoid",),
            "use_grouped_topk": (True,),
        },
    ),
    # Same layers; its files name the architecture of DeepSeek-V3.
    "kimi_k2": _DEEPSEEK_V3,
}
