"""Keys of a Hugging Face `config.json` with the same meaning in every family, and rejected families."""

from collections.abc import Mapping
from typing import Any

# Keys without effect on the logits or gradients.
_HARMLESS = """
_attn_implementation _attn_implementation_autoset _commit_hash _experts_implementation _name_or_path architectures
attn_implementation bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
classifier_dropout decoder_start_token_id diversity_penalty do_sample dtype early_stopping
encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task forced_bos_token_id
forced_eos_token_id gradient_checkpointing id2label is_decoder is_llama_config label2id length_penalty max_length
max_sequence_length min_length model_max_length model_type n_ctx name_or_path no_repeat_ngram_size num_beam_groups
num_beams num_labels num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj suppress_tokens
task_specific_params temperature tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype
torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed unsloth_version
use_bfloat16 use_cache
"""
HARMLESS = frozenset(_HARMLESS.split())

# Keys that change the mathematics, with the values Terrace implements. `None` is JSON's null.
_NOISE = """
resid_pdrop embd_pdrop attn_pdrop attention_dropout hidden_dropout attention_probs_dropout_prob hidden_dropout_prob
router_jitter_noise
"""
_NOISES = tuple(_NOISE.split())
NEXTN, NEXTN_ALIAS = "num_nextn_predict_layers", "num_mtp_layers"  # layers that predict further tokens
PROJECTION = "eh_proj"  # a module that such a layer alone has
# Keys that matter only in training, with their neutral value.
TRAINING: Mapping[str, object] = {
    **dict.fromkeys(_NOISES, 0.0),
    "output_router_logits": False,
    **dict.fromkeys((NEXTN, NEXTN_ALIAS), 0),
}
ONLY: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(_NOISES, (0.0, None)),
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

# Several names may denote one function, with different implementations in `transformers`; the first is written.
ACTIVATIONS: Mapping[str, str] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "relu": "relu",
}

CLAMPED = "clamped_silu"  # of gate and up together, in experts (`terrace.model.layers.clamped_gate`)

# Families that resemble supported ones but compute something else.
_LATENT = "deepseek_v3 has latent attention, and this family another gate or other attention"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v32", "glm4_moe_lite"), _LATENT),
    "qwen3_5": "it has images too; its text model alone is model_type qwen3_5_text",
    "qwen3_5_moe": "it has images too; its text model alone is model_type qwen3_5_moe_text",
    "gemma3": "it has images too; its text model alone is model_type gemma3_text",
}
