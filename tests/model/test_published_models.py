"""The config.json files of published models, as they are."""

import json
from typing import Any

import pytest

from terrace.base.errors import ModelError
from terrace.model.blocks import num_params
from terrace.model.config import parse_model, to_table
from terrace.model.hf.config import published_table

# The config.json files of published models (sizes and whatever else tells families apart), and how many elements their
# weight files hold, a tied matrix once.
PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "Llama-3.1-8B": (
        {
            "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
            "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 131072,
            "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
            "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                             "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.43.0.dev0", "use_cache": True, "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Mistral-7B-v0.1": (
        {
            "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
            "sliding_window": 4096, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
            "transformers_version": "4.34.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        7_241_732_096,
    ),
    "Qwen2.5-0.5B": (
        {
            "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 896, "initializer_range": 0.02,
            "intermediate_size": 4864, "max_position_embeddings": 32768, "max_window_layers": 24,
            "model_type": "qwen2", "num_attention_heads": 14, "num_hidden_layers": 24, "num_key_value_heads": 2,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.40.1", "use_cache": True, "use_mrope": False,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        494_032_768,
    ),
    "SmolLM3-3B": (
        {
            "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 128000, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
            "initializer_range": 0.02, "intermediate_size": 11008, "layer_types": ["full_attention"] * 36,
            "max_position_embeddings": 65536, "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3",
            "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16,
            "num_hidden_layers": 36, "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None,
            "torch_dtype": "bfloat16", "transformers_version": "4.54.0.dev0", "use_cache": False,
            "use_sliding_window": False, "vocab_size": 128256,
        },
        3_075_098_624,
    ),
    "granite-3.3-2b": (
        {
            "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attention_multiplier": 0.015625, "bos_token_id": 0, "embedding_multiplier": 12.0, "eos_token_id": 0,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 8192,
            "logits_scaling": 8.0, "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "granite",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "pad_token_id": 0,
            "residual_multiplier": 0.22, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 5000000.0,
            "tie_word_embeddings": True, "torch_dtype": "bfloat16", "transformers_version": "4.47.0",
            "use_cache": True, "vocab_size": 49159,
        },
        2_533_539_840,
    ),
    "OLMo-2-1124-7B": (
        {
            "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "eos_token_id": 100257, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 11008, "max_position_embeddings": 4096, "model_type": "olmo2",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 100277,
            "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 500000, "tie_word_embeddings": False,
            "torch_dtype": "float32", "transformers_version": "4.47.0.dev0", "use_cache": True, "vocab_size": 100352,
        },
        7_298_617_344,
    ),
    "Phi-4-mini-instruct": (
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 199999, "embd_pdrop": 0.0,
            "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
            "initializer_range": 0.02, "intermediate_size": 8192, "interpolate_factor": 1, "lm_head_bias": False,
            "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "phi3", "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8, "original_max_position_embeddings": 4096,
            "pad_token_id": 199999, "partial_rotary_factor": 0.75, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": {"long_factor": [1.0 + n / 8 for n in range(48)], "short_factor": [1.0] * 48,
                             "type": "longrope"},
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
            "transformers_version": "4.45.0", "use_cache": True, "vocab_size": 200064,
        },
        3_836_021_760,
    ),
    "Llama-2-7b, YaRN": (
        {
            "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
            "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
            "max_position_embeddings": 65536, "model_type": "llama", "num_attention_heads": 32,
            "num_hidden_layers": 32, "num_key_value_heads": 32, "pad_token_id": 0, "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"factor": 16.0, "finetuned": True, "original_max_position_embeddings": 4096,
                             "type": "yarn"},
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.32.0.dev0",
            "use_cache": True, "vocab_size": 32000,
        },
        6_738_415_616,
    ),
    "Phi-3-mini-4k": (
        {
            "architectures": ["Phi3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "bos_token_id": 1, "embd_pdrop": 0.0,
            "eos_token_id": 32000, "hidden_act": "silu", "hidden_size": 3072, "initializer_range": 0.02,
            "intermediate_size": 8192, "max_position_embeddings": 4096, "model_type": "phi3",
            "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
            "original_max_position_embeddings": 4096, "pad_token_id": 32000, "resid_pdrop": 0.0,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 2047,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.2",
            "use_cache": True, "vocab_size": 32064,
        },
        3_821_079_552,
    ),
    "gemma-2-2b": (
        {
            "architectures": ["Gemma2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": 50.0, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "initializer_range": 0.02,
            "intermediate_size": 9216, "max_position_embeddings": 8192, "model_type": "gemma2",
            "num_attention_heads": 8, "num_hidden_layers": 26, "num_key_value_heads": 4, "pad_token_id": 0,
            "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0, "sliding_window": 4096,
            "torch_dtype": "float32", "transformers_version": "4.42.4", "use_cache": True, "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "gemma-3-1b": (
        {
            "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": 1,
            "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912,
            "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
            "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256,
            "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
        },
        999_885_952,
    ),
    "Qwen3-0.6B": (
        {
            "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu",
            "hidden_size": 1024, "initializer_range": 0.02, "intermediate_size": 3072,
            "max_position_embeddings": 40960, "max_window_layers": 28, "model_type": "qwen3",
            "num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True,
            "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936,
        },
        596_049_920,
    ),
    "pythia-160m": (
        {
            "architectures": ["GPTNeoXForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "gelu",
            "hidden_size": 768, "initializer_range": 0.02, "intermediate_size": 3072, "layer_norm_eps": 1e-05,
            "max_position_embeddings": 2048, "model_type": "gpt_neox", "num_attention_heads": 12,
            "num_hidden_layers": 12, "rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False,
            "torch_dtype": "float16", "transformers_version": "4.24.0", "use_cache": True,
            "use_parallel_residual": True, "vocab_size": 50304,
        },
        162_322_944,
    ),
    "Mixtral-8x7B-v0.1": (
        {
            "architectures": ["MixtralForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
            "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32,
            "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8,
            "output_router_logits": False, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": None, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.36.0.dev0", "use_cache": True, "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen1.5-MoE-A2.7B": (
        {
            "architectures": ["Qwen2MoeForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643,
            "eos_token_id": 151643, "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02,
            "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
            "model_type": "qwen2_moe", "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 16,
            "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False,
            "torch_dtype": "bfloat16", "transformers_version": "4.39.0.dev0", "use_cache": True,
            "use_sliding_window": False, "vocab_size": 151936, "decoder_sparse_step": 1,
            "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4,
            "num_experts": 60, "norm_topk_prob": False, "output_router_logits": False, "router_aux_loss_coef": 0.001,
        },
        14_315_784_192,
    ),
    "Qwen3-30B-A3B": (
        {
            "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 6144,
            "max_position_embeddings": 40960, "max_window_layers": 48, "mlp_only_layers": [],
            "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "output_router_logits": False, "rms_norm_eps": 1e-06, "rope_scaling": None,
            "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None,
            "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
            "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
        },
        30_532_122_624,
    ),
    "GLM-4.5-Air": (  # its files repeat embedding and output matrix in the layer for the token after the next
        {
            "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 1, "head_dim": 128,
            "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 10944,
            "max_position_embeddings": 131072, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
            "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True,
            "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "pad_token_id": 151329, "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.0,
            "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16",
            "transformers_version": "4.54.0", "use_cache": True, "use_qk_norm": False, "vocab_size": 151552,
        },
        106_852_251_264 + 3_616_573_568 - 2 * 151_552 * 4096,
    ),
    "DeepSeek-V3": (  # as it is without quantization_config; its files hold a layer more, and weights in fp8
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
            "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 163840, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
            "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.33.1", "use_cache": True, "v_head_dim": 128, "vocab_size": 129280,
        },
        671_026_419_200 + 11_610_068_224,
    ),
    "Kimi-K2": (  # likewise
        {
            "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
            "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1, "hidden_act": "silu",
            "hidden_size": 7168, "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512,
            "max_position_embeddings": 131072, "model_type": "kimi_k2", "moe_intermediate_size": 2048,
            "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384, "n_shared_experts": 1,
            "norm_topk_prob": True, "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 61,
            "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "pretraining_tp": 1, "q_lora_rank": 1536,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
            "rope_scaling": {"beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                             "original_max_position_embeddings": 4096, "type": "yarn"},
            "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "seq_aux": True,
            "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
            "transformers_version": "4.48.3", "use_cache": True, "v_head_dim": 128, "vocab_size": 163840,
        },
        1_026_408_232_448,
    ),
    "gpt-oss-20b": (
        {
            "architectures": ["GptOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.0,
            "eos_token_id": 200002, "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
            "initial_context_length": 4096, "initializer_range": 0.02, "intermediate_size": 2880,
            "layer_types": ["sliding_attention", "full_attention"] * 12, "max_position_embeddings": 131072,
            "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24,
            "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": False, "pad_token_id": 199999,
            "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                               "model.embed_tokens", "lm_head"],
                                    "quant_method": "mxfp4"},
            "rms_norm_eps": 1e-05,
            "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
                             "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": False},
            "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
            "tie_word_embeddings": False, "transformers_version": "4.55.0.dev0", "use_cache": True,
            "vocab_size": 201088,
        },
        20_914_757_184,
    ),
}  # fmt: skip
_OSS = PUBLISHED["gpt-oss-20b"][0]
_LARGER = {
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "layer_types": [*_OSS["layer_types"], *_OSS["layer_types"][:12]],
}
PUBLISHED["gpt-oss-120b"] = _OSS | _LARGER, 116_829_156_672


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_are_read_whole(name: str) -> None:
    table, count = PUBLISHED[name]
    config = parse_model(table)
    assert num_params(config) == count
    # The file that an export writes says the same under the older keys of RoPE as under the newer ones.
    published = published_table(to_table(config), "bfloat16", {})
    assert parse_model(json.loads(json.dumps(published))) == config
    without_newer = {key: value for key, value in published.items() if key != "rope_parameters"}
    assert parse_model(without_newer) == config


# A file that transformers wrote in full, as releases before 4.30 did, has these beside its own.
FULL_DUMP: dict[str, Any] = {
    "_commit_hash": None, "add_cross_attention": False, "bad_words_ids": None, "begin_suppress_tokens": None,
    "chunk_size_feed_forward": 0, "cross_attention_hidden_size": None, "diversity_penalty": 0.0, "do_sample": False,
    "encoder_no_repeat_ngram_size": 0, "exponential_decay_length_penalty": None, "is_encoder_decoder": False,
    "length_penalty": 1.0, "max_sequence_length": 2048, "num_beam_groups": 1, "num_beams": 1, "output_scores": False,
    "pruned_heads": {}, "remove_invalid_values": False, "tf_legacy_loss": False, "tie_encoder_decoder": False,
    "use_bfloat16": False,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_remarks_change_nothing(name: str) -> None:
    table, _ = PUBLISHED[name]
    assert parse_model(table | FULL_DUMP) == parse_model(table)


@pytest.mark.parametrize("key", ["full_attn_mod", "interpolate_factor", "lm_head_bias", "mlp_bias"])
def test_parts_that_a_family_does_without_are_not_remarks(key: str) -> None:
    """Each with another value than Phi-4-mini has would be another model."""
    table, _ = PUBLISHED["Phi-4-mini-instruct"]
    with pytest.raises(ModelError, match=f"{key} = .* is not implemented"):
        parse_model(table | {key: True if key.endswith("bias") else 2})


def test_an_unknown_key_comes_with_the_way_to_drop_it() -> None:
    table, _ = PUBLISHED["Llama-3.1-8B"]
    fix = "where it changes nothing that the model computes, delete it from config.json"
    with pytest.raises(ModelError, match=f"unknown key 'remark' for llama; .*{fix}"):
        parse_model(table | {"remark": 1})
    with pytest.raises(ModelError, match=rf"unknown key rope_scaling\.remark for rope_type llama3; .*{fix}"):
        parse_model(table | {"rope_scaling": table["rope_scaling"] | {"remark": 1}})
