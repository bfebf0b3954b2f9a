"""The pure half of the model room: reading config.json, block specs and cost."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from terrace.base.errors import ModelError
from terrace.model.blocks import block_specs, forward_flops, num_params
from terrace.model.config import load_model, parse_model, to_table
from terrace.model.decoder import build_blocks

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 40,
}
LLAMA3 = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
MISTRAL: dict[str, Any] = LLAMA | {"model_type": "mistral", "num_key_value_heads": 2}
QWEN2: dict[str, Any] = MISTRAL | {"model_type": "qwen2"}
QWEN3: dict[str, Any] = MISTRAL | {"model_type": "qwen3"}
GPT_NEOX: dict[str, Any] = LLAMA | {"model_type": "gpt_neox", "hidden_size": 48}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 48,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 6,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}
TABLES = [
    LLAMA,
    LLAMA | {"num_key_value_heads": 2, "tie_word_embeddings": True},
    LLAMA | {"head_dim": 10, "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    LLAMA | {"rope_scaling": {"type": "linear", "factor": 2}, "rope_theta": 500},
    LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
    MISTRAL,
    MISTRAL | {"sliding_window": None, "head_dim": 10},
    QWEN2,
    QWEN2 | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0, "tie_word_embeddings": True},
    QWEN3,
    QWEN3 | {"head_dim": 6, "attention_bias": True},
    GPT_NEOX,
    GPT_NEOX | {"rope_scaling": {"rope_type": "linear", "factor": 3.5}},
    GPT_NEOX | {"use_parallel_residual": False, "tie_word_embeddings": True, "attention_bias": False},
    GPT2,
    GPT2 | {"tie_word_embeddings": False, "n_inner": 40, "activation_function": "relu"},
]


def test_llama_defaults_are_those_of_transformers() -> None:
    config = parse_model(LLAMA)
    assert (config.num_kv_heads, config.head_dim, config.max_positions) == (6, 4, 2048)
    assert (config.norm, config.norm_eps, config.activation, config.gated_mlp) == ("rms", 1e-6, "silu", True)
    assert (config.rope_theta, config.rotary_dim, config.parallel_residual) == (10000.0, 4, False)
    assert (config.attention_bias, config.mlp_bias, config.tied_embeddings) == (False, False, False)


def test_gpt_neox_defaults_are_those_of_transformers() -> None:
    config = parse_model(GPT_NEOX)
    assert (config.head_dim, config.rotary_dim, config.rope_theta) == (8, 2, 10000.0)
    assert (config.norm, config.norm_eps, config.activation, config.gated_mlp) == (
        "layer",
        1e-5,
        "gelu",
        False,
    )
    assert (config.parallel_residual, config.tied_embeddings) == (True, False)
    assert (config.attention_bias, config.mlp_bias) == (True, True)


def test_gpt2_defaults_are_those_of_transformers() -> None:
    config = parse_model({key: value for key, value in GPT2.items() if key != "n_positions"})
    assert (config.intermediate_size, config.max_positions, config.tied_embeddings) == (96, 1024, True)
    assert (config.rotary_dim, config.learned_positions, config.activation) == (0, True, "gelu_tanh")
    assert config.norm_eps == 1e-5


def test_older_and_newer_rotary_keys_mean_the_same() -> None:
    older = parse_model(GPT_NEOX | {"rotary_emb_base": 500, "rotary_pct": 0.5, "torch_dtype": "float16"})
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
    newer = parse_model(GPT_NEOX | {"rope_parameters": rope, "dtype": "float16"})
    assert older == newer
    assert (older.rope_theta, older.rotary_dim) == (500.0, 4)
    llama = LLAMA | {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert parse_model(LLAMA | {"rope_theta": 5e5, "rope_scaling": None}) == parse_model(llama)


def test_a_published_file_is_read_whole() -> None:
    published = LLAMA | {
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": [2, 3],
        "pad_token_id": None,
        "attention_dropout": 0.0,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "transformers_version": "4.31.0",
        "use_cache": True,
    }
    assert parse_model(published) == parse_model(LLAMA)


def test_mistral_without_a_window_key_has_the_window_of_transformers() -> None:
    assert parse_model(MISTRAL).sliding_window == 4096
    assert parse_model(MISTRAL | {"sliding_window": None}).sliding_window == 0
    # Zero is what a file says that cannot hold null, such as the resolved configuration of a run.
    assert to_table(parse_model(MISTRAL | {"sliding_window": None}))["sliding_window"] == 0
    assert parse_model(MISTRAL | {"sliding_window": 0}).sliding_window == 0


def test_qwen_has_a_window_where_it_is_switched_on() -> None:
    published = QWEN2 | {"sliding_window": 7, "max_window_layers": 2, "use_mrope": False}
    assert parse_model(published).sliding_window == 0
    assert parse_model(published | {"use_sliding_window": True}).sliding_window == 0
    assert parse_model(published | {"use_sliding_window": True, "max_window_layers": 0}).sliding_window == 7
    windows = published | {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}
    assert parse_model(windows).sliding_window == 7
    assert parse_model(QWEN3).head_dim == 128  # whatever hidden_size / num_attention_heads is
    assert parse_model(QWEN2).head_dim == 4
    config = parse_model(QWEN2)
    assert (config.qkv_bias, config.attention_bias, config.qk_norm) == (True, False, False)
    assert parse_model(QWEN3).qk_norm


@pytest.mark.parametrize("table", TABLES)
def test_round_trip(table: dict[str, Any]) -> None:
    config = parse_model(table)
    written = json.loads(json.dumps(to_table(config)))
    assert parse_model(written) == config


@pytest.mark.parametrize("rotary_dim", range(2, 100, 2))
def test_round_trip_keeps_the_rotary_dim(rotary_dim: int) -> None:
    table = GPT_NEOX | {"hidden_size": 588, "num_attention_heads": 6}  # heads of 98
    config = dataclasses.replace(parse_model(table), rotary_dim=rotary_dim)
    assert parse_model(to_table(config)).rotary_dim == rotary_dim


def test_a_configuration_outside_its_family_is_not_written() -> None:
    with pytest.raises(ModelError, match=r"gpt2 config.json cannot say num_kv_heads = 2"):
        to_table(dataclasses.replace(parse_model(GPT2), num_kv_heads=2))


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "rope_scaling.low_freq_factor is missing: rope_type llama3 needs it",
        ),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0.0 of linear RoPE scaling"),
        (LLAMA, {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2' must be a number"),
        (LLAMA, {"rope_scaling": {"type": "linear", "rope_type": "llama3"}}, "disagree: keep one"),
        (
            LLAMA,
            {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_theta": 5e5}},
            "rope_parameters and rope_scaling disagree",
        ),
        (LLAMA, {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 4}}, "must be .* below"),
        (
            LLAMA,
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": 0}},
            "must be at least 1",
        ),
        (LLAMA, {"rope_parameters": {"rope_type": "linear", **LLAMA3}}, "unknown key rope_parameters.low_freq_factor"),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "axial"}},
            "rope_type = 'axial' .* use default, linear, .* or longrope",
        ),
        (
            LLAMA,
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters.factor is missing: rope_type yarn needs it",
        ),
        (LLAMA, {"rope_scaling": 2.0}, "rope_scaling = 2.0 must be a table or null"),
        (LLAMA, {"rope_parameters": {"rope_thta": 1e4}}, "did you mean 'rope_theta'"),
        (LLAMA, {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4}, "disagree: keep one"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (LLAMA, {"rope_theta": "10000"}, "rope_theta = '10000' must be a number"),
        (LLAMA, {"sliding_window": 4096}, "unknown key 'sliding_window' for llama"),
        (MISTRAL, {"sliding_window": -3}, "sliding_window = -3 must be at least 1"),
        (MISTRAL, {"attention_bias": True}, "unknown key 'attention_bias' for mistral"),
        (MISTRAL, {"layer_types": ["full_attention"] * 2}, "layer_types = .* make all 2 'sliding_attention'"),
        (QWEN2, {"layer_types": ["full_attention"]}, "name .* for each of the 2 layers, or leave it out"),
        (QWEN2, {"layer_types": ["sliding_attention"] * 2}, "make all 2 'full_attention'"),
        (QWEN2, {"use_mrope": True}, "use_mrope = True is not implemented"),
        (LLAMA, {"attention_dropout": 0.1}, "set it to 0.0 in config.json, or give --model.attention_dropout 0.0"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config = .* set it to null in config.json$"),
        (LLAMA, {"hidden_act": "mish"}, "hidden_act = 'mish' is not implemented; "),
        (LLAMA, {"hiden_size": 24}, "unknown key 'hiden_size' for llama; did you mean 'hidden_size'"),
        (LLAMA, {"num_experts": 8}, "unknown key 'num_experts'"),
        (LLAMA, {"num_key_value_heads": 4}, "num_attention_heads = 6 is not a multiple of .* = 4"),
        (LLAMA, {"num_attention_heads": 5}, "hidden_size = 24 does not divide into num_attention_heads = 5"),
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads = 0 must be at least 1"),
        (LLAMA, {"num_hidden_layers": 0}, "num_hidden_layers = 0 must be at least 1"),
        (LLAMA, {"vocab_size": -1}, "vocab_size = -1 must be at least 1"),
        (LLAMA, {"hidden_size": 24.0}, "llama.hidden_size = 24.0 must be of type int"),
        (LLAMA, {"tie_word_embeddings": 1}, "must be of type bool"),
        (LLAMA, {"head_dim": 5}, "rotate 5 elements of a head of 5"),
        (LLAMA, {"rms_norm_eps": 0.0}, "rms_norm_eps = 0.0 must be positive"),
        (LLAMA, {"initializer_range": 0}, "initializer_range = 0.0 must be positive"),
        (LLAMA, {"rope_theta": 0}, "rope_theta = 0.0 must be positive"),
        (LLAMA, {"model_type": "lama"}, "model_type = 'lama' is not implemented; did you mean 'llama'"),
        (GPT_NEOX, {"hidden_dropout": 0.1}, "hidden_dropout = 0.1"),
        (GPT_NEOX, {"rotary_pct": 1.5}, "rotate 12 elements of a head of 8"),
        (GPT_NEOX, {"num_attention_heads": 24}, "rotate 0 elements of a head of 2, which gpt_neox does not do"),
        (GPT2, {"resid_pdrop": 0.1}, "resid_pdrop = 0.1 is not implemented"),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "set it to false"),
        (GPT2, {"scale_attn_weights": False}, "set it to true"),
        (GPT2, {"rope_theta": 10000.0}, "unknown key 'rope_theta' for gpt2"),
    ],
)
def test_refusals_name_the_key_the_value_and_the_fix(
    base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model(base | change)


@pytest.mark.parametrize("base", [LLAMA, GPT_NEOX, GPT2])
def test_a_missing_size_is_named(base: dict[str, Any]) -> None:
    sizes = [key for key in base if key in {"vocab_size", "num_hidden_layers", "n_layer", "n_embd"}]
    for key in sizes:
        with pytest.raises(ModelError, match=f"{key} is missing"):
            parse_model({name: value for name, value in base.items() if name != key})
    with pytest.raises(ModelError, match="model_type is missing"):
        parse_model({name: value for name, value in base.items() if name != "model_type"})


def test_gpt2_without_dropout_keys_means_dropout() -> None:
    with pytest.raises(ModelError, match=r"embd_pdrop = 0.1 \(the default of an absent key\)"):
        parse_model({key: value for key, value in GPT2.items() if key != "embd_pdrop"})


def test_the_fix_of_a_stock_gpt2_names_all_its_dropouts() -> None:
    stock = {key: value for key, value in GPT2.items() if not key.endswith("_pdrop")} | {"attn_pdrop": 0.1}
    flags = "--model.resid_pdrop 0.0 --model.embd_pdrop 0.0 --model.attn_pdrop 0.0"
    with pytest.raises(ModelError, match=f"resid_pdrop = 0.1 .* or give {flags}$"):
        parse_model(stock)


def test_load_model_reads_a_file_or_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(GPT_NEOX))
    assert load_model(str(file)) == load_model(str(tmp_path)) == parse_model(GPT_NEOX)
    file.write_text(json.dumps(GPT_NEOX | {"vocab_size": 0}))
    with pytest.raises(ModelError, match=r"config.json: vocab_size = 0"):
        load_model(str(tmp_path))
    file.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match=r"cannot read .*none.json"):
        load_model(str(tmp_path / "none.json"))
    with pytest.raises(ModelError, match=r"give a config.json or a folder"):
        load_model(str(tmp_path / "model.toml"))


@pytest.mark.parametrize("table", TABLES)
def test_specs_are_the_modules_parameters(table: dict[str, Any]) -> None:
    config = parse_model(table)
    specs, blocks = block_specs(config), build_blocks(config)
    assert len(specs) == len(blocks) == config.num_blocks
    assert [spec.name for spec in specs] == ["embedding", "layers.0", "layers.1", "head"]
    owned: set[int] = set()
    for spec, block in zip(specs, blocks, strict=True):
        named = [(name, param) for name, param in block.named_parameters() if id(param) not in owned]
        assert [(param.name, param.shape) for param in spec.params] == [
            (name, tuple(param.shape)) for name, param in named
        ]
        borrowed = {id(param) for param in block.parameters()} - {id(param) for _, param in named}
        owners = {id(param) for index in spec.tied_to for param in blocks[index].parameters()}
        assert borrowed <= owners
        assert bool(borrowed) == bool(spec.tied_to)
        owned |= {id(param) for param in block.parameters()}
        assert not list(block.buffers())
    assert specs[-1].tied_to == ((0,) if config.tied_embeddings else ())
    distinct = {id(param): param for block in blocks for param in block.parameters()}
    assert num_params(config) == sum(param.numel() for param in distinct.values())


def test_num_params_of_a_published_model() -> None:
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
    llama_7b = parse_model(LLAMA | sizes | {"vocab_size": 32000, "intermediate_size": 11008})
    assert num_params(llama_7b) == 6_738_415_616  # as its weight files hold
    gpt2_sizes = {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}
    assert num_params(parse_model(GPT2 | gpt2_sizes)) == 124_439_808


@pytest.mark.parametrize("table", TABLES)
def test_forward_flops_are_those_torch_counts(table: dict[str, Any]) -> None:
    config = parse_model(table)
    batch_size, sequence = 3, 20
    x = torch.zeros(batch_size, sequence, dtype=torch.int64, device="meta")
    for index, block in enumerate(build_blocks(config)):
        counter = FlopCounterMode(display=False)
        with counter:
            x = block(x)
        assert forward_flops(config, index, batch_size, sequence) == counter.get_total_flops()


def test_forward_flops_refuses_a_block_that_does_not_exist() -> None:
    config = parse_model(LLAMA)
    for index in (-1, config.num_blocks):
        with pytest.raises(IndexError, match=str(index)):
            forward_flops(config, index, 1, 1)
