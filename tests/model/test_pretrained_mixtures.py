"""Mixtures in Hugging Face folders: a tensor an expert there, one stack here, and the keys of their config.json."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.config import ModelConfig, load_model, parse_model, to_table
from terrace.model.hf.config import published_table
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.train.trained import load_trained
from tests.support.families import TABLES, our_logits, our_values, transformers

MIXTURES = [name for name, table in TABLES.items() if "num_experts_per_tok" in table]
GLM = "glm4_moe, groups, norms, biases"


@pytest.mark.parametrize("name", MIXTURES)
def test_published_keys_mean_the_same_to_transformers(name: str, tmp_path: Path) -> None:
    config = parse_model(TABLES[name])
    published = published_table(to_table(config), "float32", {})
    assert parse_model(json.loads(json.dumps(published))) == config
    (tmp_path / "config.json").write_text(json.dumps(published))
    transformers.AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "again")
    assert load_model(str(tmp_path / "again")) == config


@pytest.mark.parametrize("name", ["mixtral", GLM])
def test_other_routers_give_other_logits(name: str) -> None:
    """Otherwise equal logits would not test gates."""
    config = parse_model(TABLES[name])
    values = our_values(config)

    def turned(block: str, param: str) -> Tensor:
        return -values(block, param) if "router" in param else values(block, param)

    logits = our_logits(config, values, torch.float64)
    assert (our_logits(config, turned, torch.float64) - logits).abs().max() > 0.1 * logits.abs().max()


def test_a_bias_stays_in_fp32(tmp_path: Path) -> None:
    config = parse_model(TABLES[GLM])
    values = our_values(config, torch.float32)
    write_pretrained(tmp_path, config, values, "bf16", shard_bytes=5000)
    pretrained = Pretrained(tmp_path)
    pretrained.check()
    bias = values("layers.1", "mlp.router.bias")
    assert torch.equal(pretrained.value("layers.1", "mlp.router.bias"), bias)
    assert not torch.equal(bias, bias.bfloat16().float())
    assert pretrained.value("layers.1", "mlp.router.weight").dtype == torch.bfloat16
    blocks = load_trained(tmp_path, dtype="bf16", tokenizer="bytes").blocks
    assert torch.equal(blocks[2].get_parameter("mlp.router.bias"), bias)
    assert blocks[2].get_parameter("mlp.router.weight").dtype == torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(model.model.layers[1].mlp.gate.e_score_correction_bias, bias)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = [safetensors.torch.load_file(path) for path in tmp_path.glob("*.safetensors")]
    assert sum(tensor.nbytes for file in files for tensor in file.values()) == index["metadata"]["total_size"]


def saved(folder: Path, name: str = "qwen3_moe", shard_bytes: int = 10**9) -> ModelConfig:
    """Write a model with random values."""
    config = parse_model(TABLES[name])
    write_pretrained(folder, config, our_values(config), "fp32", shard_bytes=shard_bytes)
    return config


def test_a_stack_in_several_files_is_asked_for_once(tmp_path: Path) -> None:
    config = parse_model(TABLES["mixtral"])
    values, asked = our_values(config), Counter[tuple[str, str]]()

    def value(block: str, param: str) -> Tensor:
        asked[block, param] += 1
        return values(block, param)

    write_pretrained(tmp_path, config, value, "fp32", shard_bytes=6000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {index[f"model.layers.0.block_sparse_moe.experts.{expert}.w2.weight"] for expert in range(6)}
    assert len(files) > 1
    assert set(asked.values()) == {1}


def test_some_experts_are_read_alone(tmp_path: Path) -> None:
    saved(tmp_path, "mixtral", shard_bytes=6000)
    pretrained = Pretrained(tmp_path)
    found = pretrained.value("layers.1", "mlp.down.weight", [4, 5])
    names = [f"model.layers.1.block_sparse_moe.experts.{expert}.w2.weight" for expert in (4, 5)]
    assert set(pretrained._open) == {pretrained._files[name] for name in names}
    assert torch.equal(found, Pretrained(tmp_path).value("layers.1", "mlp.down.weight")[4:])


def test_experts_that_do_not_fit_are_named(tmp_path: Path) -> None:
    config = saved(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    assert config.experts is not None
    for changed, message in (
        (
            {"num_experts": 5},
            r"it has beside the model's model.layers.1.mlp.experts.5.down_proj.weight, .*5.up_proj.weight; ",
        ),
        ({"num_experts": 7}, "it lacks model.layers.1.mlp.experts.6.gate_proj.weight"),
        ({"intermediate_size": 15}, r"experts.0.gate_proj.weight is \[14, 24\] there and \[15, 24\] in the model"),
        ({"dense_layers": ()}, "it lacks model.layers.0.mlp.gate.weight"),
        ({"shared_size": 8}, "it lacks model.layers.1.mlp"),
    ):
        other: dict[str, Any] = changed
        wrong = replace(config, experts=replace(config.experts, **other))
        if "shared_size" in changed:
            wrong = replace(wrong, family="qwen2_moe")
        with pytest.raises(ModelError, match=message):
            Pretrained(tmp_path).check(wrong)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    safetensors.torch.save_file({key: value for key, value in tensors.items() if key != name}, path)
    with pytest.raises(ModelError, match=f"has no tensor {name}"):
        Pretrained(tmp_path).value("layers.1", "mlp.up.weight")


def test_a_layer_for_further_tokens_is_left_out(tmp_path: Path) -> None:
    """GLM-4.5 publishes one after the last."""
    config = saved(tmp_path, "glm4_moe")
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path) | {"model.layers.2.mlp.gate.weight": torch.ones(6, 24)}
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelError, match=r"has beside the model's model.layers.2.mlp.gate.weight"):
        Pretrained(tmp_path).check()
    safetensors.torch.save_file(tensors | {"model.layers.2.eh_proj.weight": torch.ones(24, 48)}, path)
    Pretrained(tmp_path).check()
    assert to_table(config)["num_nextn_predict_layers"] == 0
    saved(tmp_path / "qwen", "qwen3_moe")
    path = tmp_path / "qwen" / "model.safetensors"
    tensors = safetensors.torch.load_file(path) | {"model.layers.2.eh_proj.weight": torch.ones(24, 48)}
    safetensors.torch.save_file(tensors, path)
    with pytest.raises(ModelError, match=r"has beside the model's model.layers.2.eh_proj.weight"):
        Pretrained(tmp_path / "qwen").check()


def test_what_a_familys_file_cannot_say() -> None:
    config, dense = parse_model(TABLES["glm4_moe"]), parse_model(TABLES["llama"])
    assert config.experts is not None
    for wrong, message in (
        (replace(config, experts=None), "a glm4_moe config.json has only models with experts: use one of gemma2, "),
        (
            replace(dense, experts=config.experts),
            "a llama config.json has no experts: use one of deepseek_v3, .*mixtral, ",
        ),
        (
            replace(config, experts=replace(config.experts, dense_layers=(1,))),
            r"glm4_moe config.json cannot say experts.dense_layers = \(1,\) \(it means \(0,\)\)",
        ),
        (replace(config, experts=replace(config.experts, shared_size=15)), "cannot say experts.shared_size = 15"),
        (replace(config, experts=replace(config.experts, shared_size=0)), "n_shared_experts = 0 must be at least 1"),
        (replace(config, experts=replace(config.experts, gate="softmax")), "cannot say experts.gate = 'softmax'"),
    ):
        with pytest.raises(ModelError, match=message):
            to_table(wrong)


def test_defaults_are_those_of_transformers() -> None:
    """Leave out every key that is no size, one at a time."""
    sizes = {"model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"}
    sizes |= {"num_key_value_heads", "num_experts_per_tok", "num_local_experts", "num_experts", "n_routed_experts"}
    sizes |= {"moe_intermediate_size", "shared_expert_intermediate_size"}
    for name in ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"):
        table = {key: value for key, value in TABLES[name].items() if key in sizes} | {"hidden_size": 32}
        theirs = transformers.AutoConfig.for_model(**table).to_dict()
        if theirs.pop("num_nextn_predict_layers", None):  # they name a layer that they do not have
            theirs["num_nextn_predict_layers"] = 0
        assert parse_model(theirs) == parse_model(table)
        for key in table:
            with pytest.raises(ModelError, match=f"{key} is missing"):
                parse_model({other: value for other, value in table.items() if other != key})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise = 0.1 is not implemented: set it to 0.0"),
        ("mixtral", {"num_experts": 8}, "num_local_experts = 6 and num_experts = 8 disagree: keep one"),
        ("mixtral", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7 must be at most the 6 experts"),
        ("mixtral", {"num_local_experts": 0}, "num_local_experts = 0 must be at least 1"),
        ("mixtral", {"mlp_only_layers": [0]}, "unknown key 'mlp_only_layers' for mixtral"),
        (
            "mixtral",
            {"output_router_logits": True},
            "output_router_logits = True adds router_aux_loss_coef = 0.001 .* give --model.output_router_logits false",
        ),
        ("qwen2_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0 must be at least 1"),
        (
            "qwen2_moe",
            {"decoder_sparse_step": 3},
            "decoder_sparse_step = 3 must be at least 1 and at most the 2 layers",
        ),
        ("qwen2_moe", {"num_hidden_layers": 0}, "num_hidden_layers = 0 must be at least 1"),
        ("glm4_moe", {"num_hidden_layers": 10**12, "first_k_dense_replace": 10**11}, "num_hidden_layers = 10* must be"),
        ("qwen2_moe", {"mlp_only_layers": [0, 1]}, "mlp_only_layers leaves no layer its experts"),
        (
            "qwen2_moe",
            {"shared_expert_intermediate_size": -1},
            "shared_expert_intermediate_size = -1 must be at least 0",
        ),
        ("qwen3_moe", {"use_sliding_window": True, "layer_types": None}, "unknown key 'layer_types' for qwen3_moe"),
        ("qwen3_moe", {"mlp_only_layers": [0, 2]}, "mlp_only_layers names layer 2 of 2, counted from 0"),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "mlp_only_layers = '0' must be"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "moe_intermediate_size = 0 must be at least 1"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 8}, "shared_expert_intermediate_size = 8 .* set it to 0 in"),
        ("qwen3_moe", {"qkv_bias": True}, "qkv_bias = True is not implemented: set it to false"),
        ("mixtral", {"use_qk_norm": True}, "unknown key 'use_qk_norm' for mixtral"),
        ("glm4_moe", {"first_k_dense_replace": 2}, "first_k_dense_replace leaves no layer its experts"),
        ("glm4_moe", {"first_k_dense_replace": -1}, "first_k_dense_replace = -1 must be at least 0"),
        ("glm4_moe", {"n_shared_experts": 0}, "n_shared_experts = 0 must be at least 1"),
        ("glm4_moe", {"n_group": 4}, "n_group = 4 does not divide n_routed_experts = 6"),
        ("glm4_moe", {"topk_group": 2}, "topk_group = 2 must be at most n_group = 1"),
        ("glm4_moe", {"routed_scaling_factor": 0}, "routed_scaling_factor = 0.0 must be positive"),
        (
            "glm4_moe",
            {"model_type": "deepseek_v2"},
            "'deepseek_v2' is not implemented: .* latent attention",
        ),
        ("gpt_oss, 20b", {"swiglu_limit": 6.0}, "swiglu_limit = 6.0 is not implemented: set it to 7.0"),
        ("gpt_oss, 20b", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not implemented: set it to \"silu\""),
        ("gpt_oss, 20b", {"quantization_config": {"quant_method": "awq"}}, "quantization_config = .*awq.* is not impl"),
        ("gpt_oss, 20b", {"experts_per_token": 3}, "num_experts_per_tok = 4 and experts_per_token = 3 disagree"),
        ("glm4_moe", {"model_type": "olmoe"}, "model_type = 'olmoe' is not implemented; "),
        ("llama", {"num_experts_per_tok": 2}, "unknown key 'num_experts_per_tok' for llama"),
    ],
)
def test_refusals_name_the_key_the_value_and_the_fix(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model(TABLES[name] | change)


def test_what_only_training_knows_does_not_stop_generation(tmp_path: Path) -> None:
    training = {"router_jitter_noise": 0.1, "output_router_logits": True, "attention_dropout": 0.2}
    (tmp_path / "config.json").write_text(json.dumps(TABLES["mixtral"] | training))
    assert load_model(str(tmp_path), training=False) == parse_model(TABLES["mixtral"])
    with pytest.raises(ModelError, match="is not implemented"):
        load_model(str(tmp_path))


def test_two_spellings_of_a_key() -> None:
    table = TABLES["qwen3_moe"]
    saved_by_5 = {key: value for key, value in table.items() if key != "num_experts"} | {"num_local_experts": 6}
    assert parse_model(saved_by_5) == parse_model(table) == parse_model(table | {"num_local_experts": 6})
    assert parse_model(table | {"output_router_logits": True, "router_aux_loss_coef": 0.0}) == parse_model(table)
    coder = {"shared_expert_intermediate_size": 0, "use_qk_norm": True, "qkv_bias": False, "max_window_layers": 28}
    assert parse_model(table | coder) == parse_model(table)
