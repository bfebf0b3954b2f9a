"""A Hugging Face folder with a chat model of random weights, small enough for seconds on a CPU.

Other examples begin from it where you would begin from a downloaded model.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

# `generation` tags mark the tokens that are trained.
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ message.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tiny_model(folder: Path) -> Path:
    """Write config, weights, tokenizer and chat template; return the folder."""
    alphabet = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    encoder = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    made: Any = PreTrainedTokenizerFast  # it has no types
    tokenizer = made(tokenizer_object=encoder, eos_token="<|end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|system|>", "<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(folder)

    set_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.2,  # so that a frozen output matrix can tell tokens apart
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
