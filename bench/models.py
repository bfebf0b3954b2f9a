"""Published sizes of models that benchmarks and tests plan, as `config.json` has them."""

from typing import Any

from terrace.model.config import ModelConfig, parse_model

# Mixtral 8x7B (2401.04088, table 1).
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32768,
}
# Qwen3-30B-A3B (2505.09388, table 2).
QWEN3_30B: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}

# gpt-oss-120b (2508.10925, table 1), with the defaults of its family.
GPT_OSS_120B: dict[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 2880,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}


def llama_of(
    hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: object
) -> ModelConfig:
    """A Llama of these sizes; `more` are further keys of its config.json."""
    return parse_model(
        {
            "model_type": "llama",
            "vocab_size": vocab,
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "intermediate_size": inner,
            **more,
        }
    )
