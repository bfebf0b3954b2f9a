"""A Hugging Face folder with a tiny model and its tokenizer."""

import json
from pathlib import Path
from typing import Any

import pytest

from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initial_value

tokenizers = pytest.importorskip("tokenizers", reason="a folder's tokenizer is read with it")
TABLE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "intermediate_size": 30,
    "tie_word_embeddings": True,
    "rope_theta": 900.0,
}
TEXT = "The quick brown fox of line 0123456789 jumps over the lazy dog.\n"


def write_tokenizer(folder: Path, num_added: int = 0) -> None:
    """Train a small tokenizer, with a token that ends a text."""
    encoder = tokenizers.Tokenizer(tokenizers.models.BPE())
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=90, special_tokens=["<|endoftext|>"])
    encoder.train_from_iterator([TEXT] * 3, trainer)
    encoder.add_special_tokens([f"<{number}>" for number in range(num_added)])
    encoder.save(str(folder / "tokenizer.json"))


def write_model(folder: Path, table: dict[str, Any] = TABLE, seed: int = 4) -> Path:
    """Write a model with weights and a tokenizer, as Terrace exports them."""
    config = parse_model(table)
    shapes = {(block.name, param.name): param.shape for block in block_specs(config) for param in block.params}
    write_pretrained(
        folder,
        config,
        lambda block, param: initial_value(config, block, param, shapes[block, param], seed=seed),
        "bf16",
        shard_bytes=8_000,
    )
    write_tokenizer(folder)
    return folder


def write_folder(folder: Path, table: dict[str, Any] = TABLE) -> Path:
    """The same as others publish them: with tokens and files that Terrace carries along."""
    write_model(folder, table)
    published = json.loads((folder / "config.json").read_text()) | {"bos_token_id": 1, "eos_token_id": [0, 2]}
    (folder / "config.json").write_text(json.dumps(published))
    (folder / "generation_config.json").write_text('{"temperature":  0.7}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
