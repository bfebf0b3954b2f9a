"""Folders that are nearly the model: wrapped names, a spare head, an adapter, fewer rows than tokens."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.cli.main import main
from terrace.model.config import load_model, parse_model
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from tests.support.families import TABLES, our_values


def saved(folder: Path, name: str = "llama", **changes: Any) -> dict[str, Tensor]:
    """Write a model to a folder and return its tensors, for a test to change."""
    config = parse_model(TABLES[name] | changes)
    write_pretrained(folder, config, our_values(config), "fp32")
    return safetensors.torch.load_file(folder / "model.safetensors")


@pytest.mark.parametrize(
    ("prefix", "who"),
    [
        ("_orig_mod.", "_orig_mod. of torch.compile"),
        ("module.", "module. of DistributedDataParallel"),
        ("model.", "in front: save"),
        ("base_model.model.", "of peft"),
        ("module._orig_mod.", "_orig_mod. of torch.compile and module. of DistributedDataParallel"),
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_names_of_a_wrapper_are_named(name: str, prefix: str, who: str, tmp_path: Path) -> None:
    tensors = {f"{prefix}{key}": value for key, value in saved(tmp_path, name).items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        Pretrained(tmp_path).check()
    assert f"every name has {prefix!r} in front" in str(caught.value)
    assert who in str(caught.value)
    assert f"name.removeprefix({prefix!r})" in str(caught.value)
    remedy = {key.removeprefix(prefix): value for key, value in tensors.items()}
    safetensors.torch.save_file(remedy, tmp_path / "model.safetensors")
    Pretrained(tmp_path).check()


@pytest.mark.parametrize("wrapper", ["_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module."])
def test_wrappers_of_each_layer_are_named(wrapper: str, tmp_path: Path) -> None:
    plain = saved(tmp_path)
    tensors = {key.replace("self_attn.", f"{wrapper}self_attn."): value for key, value in plain.items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError) as caught:
        Pretrained(tmp_path).check()
    assert f"names have {wrapper} of " in str(caught.value)
    assert f"name.replace('.{wrapper}', '.')" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A.default.weight", "adapter inside the model: merge"),
        ("model.layers.0.self_attn.q_proj.base_layer.weight", "adapter inside the model: merge"),
        ("model.layers.0.self_attn.q_proj.weight_scale_inv", "quantised matrices"),
        ("model.layers.0.self_attn.q_proj.qweight", "quantised matrices"),
        ("model.layers.0.self_attn.q_proj.weight.absmax", "quantised matrices"),
        ("model.layers.0.self_attn.q_proj.weight.quant_state.bitsandbytes__nf4", "quantised matrices"),
    ],
)
@pytest.mark.parametrize("is_beside", [True, False])
def test_matrices_in_another_form_are_named(name: str, words: str, is_beside: bool, tmp_path: Path) -> None:
    tensors = saved(tmp_path) | {name: torch.ones(2, 2)}
    if not is_beside:
        del tensors["model.layers.0.self_attn.q_proj.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=words):
        Pretrained(tmp_path).check()


def test_a_spare_head_is_named(tmp_path: Path) -> None:
    head = {"v_head.summary.weight": torch.ones(1, 24), "v_head.summary.bias": torch.ones(1)}
    safetensors.torch.save_file({**saved(tmp_path), **head}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"has a module of its own beside the model, v_head\.\*, as a head for values"):
        Pretrained(tmp_path).check()


def test_names_that_say_nothing_get_no_guess(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.ones(2, 2)
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match="give --model the folder of the weights"):
        Pretrained(tmp_path).check()


@pytest.mark.parametrize(
    "words",
    [
        lambda path: ["train", "--model", path],
        lambda path: ["simulate", "--model", path],
        lambda path: ["train", "--train.weights", path],
        lambda path: ["upcycle", path, f"{path}-out", "--experts", "2"],
        lambda path: ["prune", path, f"{path}-out", "--layers", "0.5", "--data", "x", "--tokenizer", "bytes"],
        lambda path: ["generate", path, "--prompt", "a", "--tokenizer", "bytes"],
        lambda path: ["eval", path, "--data", "x", "--tokenizer", "bytes"],
    ],
)
def test_an_adapter_is_no_model(
    words: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "meta/small", "r": 4}))
    (folder / "adapter_model.safetensors").write_bytes(safetensors.torch.save({"a": torch.ones(1)}))
    (tmp_path / "x").write_text("text")
    given = [str(tmp_path / "x") if word == "x" else word for word in words(str(folder))]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert f"{folder} holds an adapter of meta/small, not a model: merge it" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_begin_as_the_mean_of_the_others(tied: bool, tmp_path: Path) -> None:
    tensors = saved(tmp_path, tie_word_embeddings=tied)
    config = load_model(str(tmp_path))
    larger = replace(config, vocab_size=config.vocab_size + 2)
    with pytest.raises(ModelError, match=r"embed_tokens.weight is \[61, 24\] there and \[63, 24\]"):
        Pretrained(tmp_path, larger).check()  # nobody has asked for rows
    weights = Pretrained(tmp_path, larger, adds_rows=True)
    weights.check()
    assert weights.num_new_rows == 2
    places = [("embedding", "model.embed_tokens.weight")] + [("head", "lm_head.weight")] * (not tied)
    for block, name in places:
        found = weights.value(block, "weight")
        assert torch.equal(found[:61], tensors[name])
        assert torch.allclose(found[61:], tensors[name].mean(0).expand(2, -1), atol=1e-7)
    inner = weights.value("layers.0", "attention.query.weight")
    assert torch.equal(inner, tensors["model.layers.0.self_attn.q_proj.weight"])


def test_rows_are_not_added_to_a_folder_that_contradicts_itself(tmp_path: Path) -> None:
    saved(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"vocab_size": 63}))
    with pytest.raises(ModelError, match=r"is \[61, 24\] there and \[63, 24\]"):
        Pretrained(tmp_path, load_model(str(tmp_path)), adds_rows=True).check()
