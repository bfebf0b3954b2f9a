"""The tables of toy decoders of several families, as their config.json has them."""

VOCAB = 11

SIZES = {"vocab_size": VOCAB, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = SIZES | {"model_type": "llama", "intermediate_size": 10, "num_key_value_heads": 2, "hidden_act": "silu"}
QWEN2 = LLAMA | {"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}}
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 6}
NEOX = SIZES | {"model_type": "gpt_neox", "intermediate_size": 12, "rotary_pct": 1.0}
GPT2 = {"model_type": "gpt2", "vocab_size": VOCAB, "n_embd": 8, "n_layer": 2, "n_head": 4, "n_positions": 8}
GPT2 |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

SMOLLM3 = LLAMA | {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 3}
GRANITE = LLAMA | {"model_type": "granite", "embedding_multiplier": 5, "residual_multiplier": 0.4}
GRANITE |= {"attention_multiplier": 0.3, "logits_scaling": 0.5}
GEMMA3 = LLAMA | {"model_type": "gemma3_text", "head_dim": 6, "sliding_window": 3, "sliding_window_pattern": 2}
GEMMA2 = LLAMA | {"model_type": "gemma2", "head_dim": 6, "sliding_window": 3, "attn_logit_softcapping": 0.1}
GEMMA2 |= {"final_logit_softcapping": 1.0}

# Latent attention: values are shorter than queries; a dense layer, and mixtures of eight experts in groups.
LATENT = LLAMA | {"model_type": "deepseek_v3", "num_key_value_heads": 4, "q_lora_rank": 6, "kv_lora_rank": 5}
LATENT |= {"qk_rope_head_dim": 2, "qk_nope_head_dim": 4, "v_head_dim": 3, "moe_intermediate_size": 6}
LATENT |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}

# Attention sinks, every other layer with a window; experts with biases and a clamped gate.
SUNK = LLAMA | {"model_type": "gpt_oss", "head_dim": 6, "sliding_window": 3, "num_local_experts": 8}
SUNK |= {"num_experts_per_tok": 3, "intermediate_size": 6}
# Two layers, the first of them linear, with two key heads for four heads of values; then the same with experts.
LINEAR = LLAMA | {"model_type": "qwen3_5_text", "head_dim": 8, "full_attention_interval": 2}
LINEAR |= {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 3,
    "linear_value_head_dim": 2,
}
NEXT = LINEAR | {"model_type": "qwen3_next", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
NEXT |= {"shared_expert_intermediate_size": 6}

# Kimi Delta Attention with an MLP, then latent attention without RoPE with experts.
KIMI = LLAMA | {"model_type": "kimi_linear", "num_key_value_heads": 4, "kv_lora_rank": 5, "qk_rope_head_dim": 2}
KIMI |= {"qk_nope_head_dim": 4, "v_head_dim": 3, "linear_num_heads": 4, "linear_head_dim": 3, "num_experts": 4}
KIMI |= {"num_experts_per_token": 2, "moe_intermediate_size": 6, "layer_types": ["linear_attention", "full_attention"]}

# Grouped heads whose norms differ from latent attention's; all layers but the first have experts.
GLM = LLAMA | {"model_type": "glm4_moe", "head_dim": 4, "use_qk_norm": True, "moe_intermediate_size": 6}
GLM |= {"n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}

# Eight heads, for eight tensor ranks; neither the vocabulary nor the inner size divides by four.
WIDE = {"hidden_size": 16, "num_attention_heads": 8}
WIDE_GPT2 = GPT2 | {"n_embd": 16, "n_head": 8}

# Eight blocks, one for each of 4 stages x 2 chunks; and a layer, a matrix or the table frozen.
DEEP = {"num_hidden_layers": 6}
FROZEN_LAYER = ("layers.1.*", "layers.0.mlp.down.*")

# Dims of multiples of 16, also on two tensor ranks: for products of 8-bit floats.
SIXTEENS = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 96}

FROZEN_SINKS = ("layers.1.*", "layers.0.attention.sinks", "layers.2.mlp.down.*", "layers.3.mlp.gate.bias")
