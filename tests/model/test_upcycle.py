"""Upcycled models: the logits of the dense model, here and in `transformers`, and clear refusals."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from terrace.base.errors import ModelError
from terrace.cli.main import main
from terrace.model.blocks import block_specs
from terrace.model.config import load_model, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.experts.mixture import Router
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.upcycle import Upcycling
from terrace.model.hf.written import write_pretrained
from tests.support.families import TABLES, TOKENS, our_logits, our_values, their_logits
from tests.support.folders import bytes_of
from tests.support.hf_folder import write_folder
from tests.support.toys import run_blocks

# Values unlike the defaults of the families' mixtures.
_CHANGED: dict[str, Any] = {"intermediate_size": 36, "rope_theta": 777.0, "rms_norm_eps": 1e-3}
DENSE = {
    "llama": TABLES["llama"] | _CHANGED,
    "llama 3.1, tied": TABLES["llama 3.1, 1 kv head"] | {"intermediate_size": 36, "tie_word_embeddings": True},
    "mistral, window": TABLES["mistral, window"] | _CHANGED,
    "qwen2, window": TABLES["qwen2, window"] | _CHANGED,
    "qwen3, biases": TABLES["qwen3, biases"] | _CHANGED,
}
FAMILY = {"llama": "mixtral", "mistral": "mixtral", "qwen2": "qwen2_moe", "qwen3": "qwen3_moe"}


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", DENSE)
def test_logits_are_those_of_the_dense_model(name: str, parts: int, tmp_path: Path) -> None:
    dense = parse_model(DENSE[name])
    values, upcycling = our_values(dense), Upcycling(num_copies=4, per_token=2, num_parts=parts)
    config, upcycled = upcycling.config_of(dense), upcycling.values(dense, values)
    assert config.family == FAMILY[dense.family]
    write_pretrained(tmp_path / "made", config, upcycled, "fp64")
    for dtype, within in ((torch.float64, 1e-12), (torch.float32, 1e-6)):
        wanted = our_logits(dense, values, dtype)
        for found in (our_logits(config, upcycled, dtype), their_logits(tmp_path / "made", dtype)):
            assert (found - wanted).abs().max() <= within * wanted.abs().max()
    assert load_model(str(tmp_path / "made")) == config


def test_copies_get_different_tokens_and_their_parts_the_same() -> None:
    dense = parse_model(DENSE["llama"])
    upcycling = Upcycling(num_copies=4, per_token=2, num_parts=3)
    config, upcycled = upcycling.config_of(dense), upcycling.values(dense, our_values(dense))
    router = Router(config)
    router.weight.data = upcycled("layers.0", "mlp.router.weight")
    copies = router(torch.randn(50, dense.hidden_size), None).experts.view(50, 2, 3) // 3
    assert (copies == copies[:, :, :1]).all()
    assert set(copies.flatten().tolist()) == {0, 1, 2, 3}
    other = replace(upcycling, seed=1).values(dense, our_values(dense))
    assert not torch.equal(other("layers.0", "mlp.router.weight"), router.weight)
    assert not torch.equal(upcycled("layers.1", "mlp.router.weight"), router.weight)


def test_copies_part_ways_in_training() -> None:
    """A step changes each copy by the tokens that it got; a shared copy by all of them, and its gate too."""
    dense = parse_model(DENSE["qwen2, window"])
    upcycling = Upcycling(num_copies=3, per_token=1, num_parts=2)
    config, upcycled = upcycling.config_of(dense), upcycling.values(dense, our_values(dense))
    blocks = build_blocks(config, "cpu", torch.float64)
    with torch.no_grad():
        for spec, block in zip(block_specs(config), blocks, strict=True):
            for param in spec.params:
                block.get_parameter(param.name).copy_(upcycled(spec.name, param.name))
    torch.autograd.backward(run_blocks(blocks, TOKENS).logsumexp(-1).sum())
    for name in ("mlp.gate.weight", "mlp.down.weight"):
        gradient = blocks[1].get_parameter(name).grad
        assert gradient is not None
        copies = gradient.view(3, -1)
        assert all(not torch.allclose(copies[a], copies[b], rtol=0.1) for a, b in ((0, 1), (0, 2), (1, 2)))
    gate = blocks[1].get_parameter("mlp.shared_gate.weight").grad
    assert gate is not None
    assert gate.abs().max() > 0


def test_a_folder_is_upcycled_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = write_folder(tmp_path / "dense")
    words = ["upcycle", str(dense), str(tmp_path / "made"), "--experts", "3", "--parts", "2", "--shard-bytes", "9000"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "a qwen3_moe model in bf16: 6 experts a layer, 4 for a token; " in said
    made = Pretrained(tmp_path / "made")
    made.check()
    assert made.dtype == "bf16"
    assert len(list((tmp_path / "made").glob("*.safetensors"))) > 1
    table = json.loads((tmp_path / "made" / "config.json").read_text())
    assert (table["eos_token_id"], table["norm_topk_prob"]) == ([0, 2], True)
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "made" / name).read_bytes() == (dense / name).read_bytes()
    wanted, found = (our_logits(each.config, each.value, torch.float32) for each in (Pretrained(dense), made))
    assert TOKENS.max() < made.config.vocab_size
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    words[2] = str(tmp_path / "again")
    assert main(words) == 0
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "made")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--experts 0", "--experts 0 must be at least 1"),
        ("--experts 100000", "num_experts = 100000 must be at most 65536"),
        ("--experts 1", "--per-token 2 must be at most --experts 1"),
        ("--experts 4 --parts 7", "--parts 7 does not divide the MLP's intermediate_size = 30"),
        ("--experts 4 --noise 0", "--noise 0.0 must be positive"),
        ("--experts 4 --seed -1", "--seed -1 must be at least 0"),
        ("--experts 4 --shard-bytes 0", "--shard-bytes 0 must be at least 1"),
        ("--experts 4 --gate softmax", "unknown argument '--gate'; see terrace upcycle --help"),
        ("", "the following arguments are required: --experts"),
    ],
)
def test_options_that_make_no_mixture(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_folder(tmp_path / "dense")
    assert main(["upcycle", str(dense), str(tmp_path / "made"), *words.split()]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt2", r"no family of mixtures has the layers of gpt2: upcycle one of llama \(mixtral\), "),
        ("gpt_neox", "no family of mixtures has the layers of gpt_neox"),
        ("mixtral", "a mixtral model has experts already"),
        ("llama, tied, biases", "MLPs have biases, and experts have none"),
        ("attention", "no family of mixtures has this llama model with experts: .* cannot say attention_bias = True"),
    ],
)
def test_models_that_make_no_mixture(name: str, message: str) -> None:
    table = TABLES["llama"] | {"attention_bias": True} if name == "attention" else TABLES[name]
    with pytest.raises(ModelError, match=message):
        Upcycling(num_copies=2).config_of(parse_model(table))


def test_a_run_is_exported_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.toml").touch()
    assert main(["upcycle", str(tmp_path), str(tmp_path / "made"), "--experts", "2"]) == 2
    assert "is a run folder: make a model of it first with terrace export" in capsys.readouterr().err
