"""Hugging Face folders: the logits of `transformers` in both directions, the same bytes again, clear refusals."""

import json
import os
import random
import signal
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.base.sealed import ChangedFile
from terrace.model.blocks import block_specs, num_params
from terrace.model.config import load_model, parse_model
from terrace.model.hf.names import sources, stored_bytes
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from tests.support.families import (
    TABLES,
    WITHIN,
    our_logits,
    our_values,
    their_logits,
    their_model,
    transformers,
)
from tests.support.folders import bytes_of
from tests.support.nightly import in_turns, nightly


@pytest.mark.parametrize("name", [*[*TABLES][1::2], *nightly(*[*TABLES][::2])])
def test_their_model_has_the_same_logits_here(name: str, tmp_path: Path) -> None:
    their_model(tmp_path, TABLES[name])
    pretrained = Pretrained(tmp_path)
    pretrained.check()
    assert pretrained.dtype == "fp64"
    for dtype, within in WITHIN.items():
        here, there = our_logits(pretrained.config, pretrained.value, dtype), their_logits(tmp_path, dtype)
        scale = there.abs().max()
        assert scale > 0.5, "the logits tell nothing"
        assert (here - there).abs().max() <= within * scale


@pytest.mark.parametrize("name", in_turns(2, TABLES))  # the others are read by day
def test_our_model_has_the_same_logits_there(name: str, tmp_path: Path) -> None:
    config = parse_model(TABLES[name])
    values = our_values(config)
    write_pretrained(tmp_path / "out", config, values, "fp64", shard_bytes=9000 if "gpt" in name else 10**9)
    for dtype, within in WITHIN.items():
        here, there = our_logits(config, values, dtype), their_logits(tmp_path / "out", dtype)
        assert (here - there).abs().max() <= within * there.abs().max()
    assert load_model(str(tmp_path / "out")) == config


@pytest.mark.parametrize("name", ["llama 3.1, 1 kv head", "qwen2, tied", "gpt_neox", "gpt2", "mixtral", "glm4_moe"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_what_is_written_and_read_is_written_the_same(name: str, dtype: str, tmp_path: Path) -> None:
    config = parse_model(TABLES[name])
    write_pretrained(tmp_path / "one", config, our_values(config), dtype, shard_bytes=4000, end_of_text=5)
    pretrained = Pretrained(tmp_path / "one")
    assert (pretrained.dtype, pretrained.config) == (dtype, config)
    write_pretrained(tmp_path / "two", config, pretrained.value, dtype, shard_bytes=4000, source=tmp_path / "one")
    assert bytes_of(tmp_path / "one") == bytes_of(tmp_path / "two")
    table = json.loads((tmp_path / "two" / "config.json").read_text())
    assert (table["bos_token_id"], table["eos_token_id"]) == (None, 5)
    assert len(list((tmp_path / "two").glob("model-*.safetensors"))) > 2
    index = json.loads((tmp_path / "two" / "model.safetensors.index.json").read_text())
    stored = [safetensors.torch.load_file(path) for path in (tmp_path / "two").glob("*.safetensors")]
    assert sum(tensor.nbytes for file in stored for tensor in file.values()) == index["metadata"]["total_size"]


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gpt_neox", "gpt2", "mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe"]
)
def test_their_folder_is_written_with_the_same_tensors(name: str, tmp_path: Path) -> None:
    """Names, shapes, dtypes and bits are those of `save_pretrained`, from sharded files as well."""
    their_model(tmp_path / "theirs", TABLES[name], torch.bfloat16, max_shard_size="6KB")
    pretrained = Pretrained(tmp_path / "theirs")
    pretrained.check()
    write_pretrained(tmp_path / "ours", pretrained.config, pretrained.value, "bf16", source=tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 1
    theirs: dict[str, Tensor] = {}
    for path in (tmp_path / "theirs").glob("*.safetensors"):
        theirs |= safetensors.torch.load_file(path)
    ours = safetensors.torch.load_file(tmp_path / "ours" / "model.safetensors")
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert ours[key].dtype == tensor.dtype
        assert torch.equal(ours[key], tensor), key
    assert (tmp_path / "ours" / "generation_config.json").read_bytes() == (
        tmp_path / "theirs" / "generation_config.json"
    ).read_bytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_they_load_the_dtype_that_was_written(dtype: torch.dtype, tmp_path: Path) -> None:
    config = parse_model(TABLES["qwen3"])
    name = {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
    write_pretrained(tmp_path / "out", config, our_values(config), name)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    model.save_pretrained(tmp_path / "theirs")  # and what they save of it is what they were given
    for key, tensor in safetensors.torch.load_file(tmp_path / "theirs" / "model.safetensors").items():
        assert torch.equal(tensor, safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")[key])
    assert load_model(str(tmp_path / "theirs")) == config


def saved(folder: Path, name: str = "llama", **changes: Any) -> dict[str, Tensor]:
    """Write a model to a folder and return its tensors, for a test to damage."""
    config = parse_model(TABLES[name] | changes)
    write_pretrained(folder, config, our_values(config), "fp32")
    return safetensors.torch.load_file(folder / "model.safetensors")


def test_weights_of_the_model_without_its_head_are_read(tmp_path: Path) -> None:
    """As the first files of GPT-2 are: without the beginning of the names, and with the mask among the parameters."""
    tensors = saved(tmp_path, "gpt2")
    short = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    short["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    safetensors.torch.save_file(short, tmp_path / "model.safetensors")
    pretrained = Pretrained(tmp_path)
    pretrained.check()
    assert torch.equal(pretrained.value("layers.1", "mlp.up.weight"), tensors["transformer.h.1.mlp.c_fc.weight"].t())


def test_an_output_matrix_that_is_stored_although_it_is_tied(tmp_path: Path) -> None:
    tensors = saved(tmp_path, tie_word_embeddings=True)
    again = tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
    safetensors.torch.save_file(again, tmp_path / "model.safetensors")
    Pretrained(tmp_path).check()
    again["lm_head.weight"][3, 2] += 1.0
    safetensors.torch.save_file(again, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lm_head.weight that differs .* give --model.tie_word_embeddings false"):
        Pretrained(tmp_path).check()
    Pretrained(tmp_path, replace(Pretrained(tmp_path).config, tied_embeddings=False)).check()


def test_what_does_not_fit_is_named_with_both_shapes(tmp_path: Path) -> None:
    tensors = saved(tmp_path)
    config = Pretrained(tmp_path).config
    wrong = {
        "head_dim": r"q_proj.weight is \[24, 24\] there and \[32, 24\] in the model",
        "qkv_bias": "it lacks model.layers.0.self_attn.q_proj.bias, .* and 3 more",
        "num_layers": "it has beside the model's model.layers.1.* and 6 more",
        "vocab_size": r"embed_tokens.weight is \[61, 24\] there and \[64, 24\]",
    }
    changed: dict[str, Any] = {"head_dim": 8, "rotary_dim": 8, "qkv_bias": True, "num_layers": 1, "vocab_size": 64}
    for name, message in wrong.items():
        names = (name, "rotary_dim") if name == "head_dim" else (name,)
        with pytest.raises(ModelError, match=message):
            Pretrained(tmp_path).check(replace(config, **{each: changed[each] for each in names}))
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"it lacks lm_head.weight: give --model.tie_word_embeddings true"):
        Pretrained(tmp_path).check()
    tensors = {name: tensor.to(torch.int8) if "norm" in name else tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"norm.weight is stored as I8, and only F64, F32, BF16, F16 are read"):
        Pretrained(tmp_path, replace(config, tied_embeddings=True)).check()


def test_files_that_are_not_there_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        Pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"has pytorch_model.bin, but weights are read from model.safetensors"):
        Pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0")
    with pytest.raises(ModelError, match=r"cannot read .*model.safetensors .*download it again"):
        Pretrained(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}))
    with pytest.raises(ModelError, match=r"names model-00001-of-00001.safetensors, which is not in the folder"):
        Pretrained(tmp_path)
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../model.safetensors"}}))
    with pytest.raises(ModelError, match=r"names ../model.safetensors, which is not"):
        Pretrained(tmp_path)
    index.write_text("{}")
    with pytest.raises(ModelError, match="has no weight_map"):
        Pretrained(tmp_path)


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    config = parse_model(TABLES["llama"])
    values = our_values(config)

    def breaks(block: str, param: str) -> Tensor:
        return values(block, param) if block != "layers.1" else values(block, param) * torch.inf

    def large(block: str, param: str) -> Tensor:
        return values(block, param) * 1e6

    with pytest.raises(ModelError, match=r"embed_tokens.weight has values beyond what fp16 holds"):
        write_pretrained(tmp_path / "out", config, large, "fp16")
    with pytest.raises(KeyError):
        write_pretrained(tmp_path / "out", replace(config, num_layers=3), values, "fp32", shard_bytes=1000)
    assert not list(tmp_path.iterdir())
    write_pretrained(tmp_path / "out", config, breaks, "fp16")  # what is infinite in training is written as it is
    with pytest.raises(ModelError, match=r"out is there and not an empty folder: name a new one"):
        write_pretrained(tmp_path / "out", config, values, "fp32")
    with pytest.raises(ModelError, match="dtype = 'int8' is not known"):
        write_pretrained(tmp_path / "other", config, values, "int8")
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="cannot write"):
        write_pretrained(tmp_path / "file" / "out", config, values, "fp32")
    with pytest.raises(ModelError, match=r"llama config.json cannot say qk_norm"):
        write_pretrained(tmp_path / "other", replace(config, qk_norm=True), values, "fp32")


def test_what_a_killed_export_left_goes_with_the_next(tmp_path: Path) -> None:
    config = parse_model(TABLES["llama"])
    values = our_values(config)

    def killed(block: str, param: str) -> Tensor:
        if block == "layers.1":
            os.kill(os.getpid(), signal.SIGKILL)
        return values(block, param)

    child = os.fork()
    if not child:
        write_pretrained(tmp_path / "out", config, killed, "fp32", shard_bytes=1000)
    os.waitpid(child, 0)
    assert [path.name for path in tmp_path.iterdir()] == [".out.0.new"]
    write_pretrained(tmp_path / "out", config, values, "fp32")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["gpt2", "glm4_moe"])
def test_damaged_weights_are_refused_and_an_edited_file_is_said(name: str, tmp_path: Path) -> None:
    config = parse_model(TABLES[name])
    values = our_values(config)
    write_pretrained(tmp_path, config, values, "bf16", end_of_text=3)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    begin = 8 + int.from_bytes(whole[:8], "little")
    params = [(block.name, param.name) for block in block_specs(config) for param in block.params]
    draw = random.Random(0)
    for _ in range(20):
        place = draw.randrange(begin, len(whole))
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << draw.randrange(8)]) + whole[place + 1 :])
        weights = Pretrained(tmp_path)
        weights.check()
        with pytest.raises(ModelError, match=r"model.safetensors is damaged \(.* does not have its checksum\)"):
            [weights.value(block, param) for block, param in params]
    path.write_bytes(whole)
    with warnings.catch_warnings(action="error"):
        Pretrained(tmp_path).check()
    table = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(table | {"initializer_range": 0.03}))
    with pytest.warns(ChangedFile, match=r"config.json is not as it was written: .* exported with another"):
        Pretrained(tmp_path).check()


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    """A rank of a later stage does not need the files of earlier layers."""
    config = parse_model(TABLES["llama"])
    values = our_values(config, torch.float32)
    write_pretrained(tmp_path, config, values, "fp32", shard_bytes=12_000)
    pretrained = Pretrained(tmp_path)
    assert torch.equal(pretrained.value("layers.1", "mlp.down.weight"), values("layers.1", "mlp.down.weight"))
    assert set(pretrained._open) == {pretrained._files["model.layers.1.mlp.down_proj.weight"]}


def test_every_parameter_has_one_place(tmp_path: Path) -> None:
    """Tensors of a family and their parts: each part of each tensor belongs to one parameter."""
    for table in TABLES.values():
        config = parse_model(table)
        found = [(name, source.part) for source in sources(config).values() for name in source.tensors]
        assert len(set(found)) == len(found)
        wholes = {name: source.num_parts for source in sources(config).values() for name in source.tensors}
        assert sorted(found) == sorted((name, part) for name, parts in wholes.items() for part in range(parts))
        assert stored_bytes(config, 4) == 4 * num_params(config)
