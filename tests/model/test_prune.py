"""Pruned models: the logits of the whole model with the same units set to zero, here and in `transformers`."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.cli.main import main
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, load_model, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.model.importance import Meter
from terrace.model.prune import HEADS, Importance, Kept, Shares, pruned_values
from tests.support.families import TABLES, TOKENS, our_logits, our_values, their_logits
from tests.support.folders import bytes_of
from tests.support.hf_folder import TEXT, write_folder, write_model
from tests.support.toys import run_blocks

Values = Callable[[str, str], Tensor]
_HALF = Shares(heads=0.5, intermediate=0.5)
_FEWER = Shares(layers=0.5, intermediate=0.7)
CASES = {
    "llama": _HALF,
    "llama, tied, biases": Shares(layers=0.5, heads=0.75, intermediate=0.3),
    "mistral, window": _HALF,
    "qwen2": Shares(layers=0.5, intermediate=0.5),
    "qwen3, biases": _FEWER,
    "qwen3, half of the layers with a window": Shares(layers=0.5, heads=0.5),
    "phi3": _FEWER,
    "olmo2": _FEWER,
    "smollm3": Shares(heads=0.5, intermediate=0.5),
    "granite": Shares(layers=0.5, heads=0.5, intermediate=0.5),
    "gemma2": _HALF,
    "gemma3_text": Shares(layers=0.5, heads=0.5, intermediate=0.5),
    "gpt2": _FEWER,
    "gpt_neox": _FEWER,
    "mixtral": _HALF,
    "gpt_oss, 120b": Shares(layers=0.667, heads=0.5, intermediate=0.5),
    "qwen2_moe": Shares(intermediate=0.5),
    "qwen3_moe": Shares(layers=0.5, heads=0.5, intermediate=0.6),
    "glm4_moe, groups, norms, biases": _HALF,
    "deepseek_v3": Shares(heads=0.5, intermediate=0.5),
}
_BY_DAY = ("llama, tied, biases", "qwen2", "gemma3_text", "qwen3_moe", "deepseek_v3")


def case(name: str) -> Any:
    return pytest.param(name, marks=[] if name in _BY_DAY else [pytest.mark.nightly])


def built(config: ModelConfig, value: Values) -> list[torch.nn.Module]:
    blocks = build_blocks(config, "cpu", torch.float64)
    with torch.no_grad():
        for spec, block in zip(block_specs(config), blocks, strict=True):
            for param in spec.params:
                block.get_parameter(param.name).copy_(value(spec.name, param.name))
    return blocks


@torch.no_grad()
def measured(config: ModelConfig, value: Values) -> Importance:
    meter, blocks = Meter(config), built(config, value)
    with meter.attached(blocks):
        run_blocks(blocks, TOKENS)
    return meter.importance


def zeroed(config: ModelConfig, value: Values, kept: Kept, queries: int) -> Values:
    """The whole model, in which units and layers that go add nothing: written by the names of parameters."""

    def values(block: str, param: str) -> Tensor:
        found, (kind, _, index) = value(block, param).clone(), block.partition(".")
        if kind != "layers":
            return found
        outputs = param.endswith(("output.weight", "output.bias", "down.weight", "down.bias"))
        if int(index) not in kept.layers:
            return torch.zeros_like(found) if outputs else found
        units = kept.units[kept.layers.index(int(index))]
        if param == "attention.output.weight":
            size = found.shape[1] // (config.num_kv_heads * queries)
            stays = {group * queries + each for group in units[HEADS].tolist() for each in range(queries)}
            for head in set(range(config.num_heads)) - stays:
                found[:, head * size : (head + 1) * size] = 0
        elif param in ("mlp.down.weight", "mlp.shared.down.weight") and found.dim() == 2:
            mask = torch.zeros(found.shape[1], dtype=found.dtype)
            mask[units["intermediate"]] = 1
            found *= mask
        elif param == "mlp.down.weight":
            for expert, own in zip(found, units["expert_intermediate"], strict=True):
                expert *= torch.zeros(found.shape[2], dtype=found.dtype).index_fill(0, own, 1)
        return found

    return values


@pytest.mark.parametrize("name", [case(name) for name in CASES])
def test_logits_are_those_with_the_same_units_zeroed(name: str, tmp_path: Path) -> None:
    whole, shares = parse_model(TABLES[name]), CASES[name]
    value = our_values(whole)
    kept = shares.chosen(whole, measured(whole, value))
    config, pruned = shares.config_of(whole, kept.layers), pruned_values(whole, kept, value)
    for spec in block_specs(config):
        for param in spec.params:
            assert pruned(spec.name, param.name).shape == param.shape
    without = zeroed(whole, value, kept, whole.num_heads // whole.num_kv_heads)
    write_pretrained(tmp_path / "made", config, pruned, "fp64")
    for dtype, within, theirs in ((torch.float64, 1e-10, 1e-10), (torch.float32, 1e-6, 1e-5)):
        wanted = our_logits(whole, without, dtype)
        assert (our_logits(config, pruned, dtype) - wanted).abs().max() <= within * wanted.abs().max()
        assert (their_logits(tmp_path / "made", dtype) - wanted).abs().max() <= theirs * wanted.abs().max()
    assert load_model(str(tmp_path / "made")) == config


@torch.no_grad()
def test_importance_is_what_a_unit_adds() -> None:
    """Against its definition: the output with the unit alone, and the cosine of a layer's input and output."""
    whole = parse_model(TABLES["llama, tied, biases"] | {"attention_bias": False, "mlp_bias": False})
    value = our_values(whole)
    found, blocks = measured(whole, value), built(whole, value)
    x = blocks[0](TOKENS)
    num_tokens = TOKENS.numel()
    for layer in range(whole.num_layers):
        block, inner = blocks[1 + layer], list[Tensor]()

        def keep(own: list[Tensor], _: Any, inputs: tuple[Tensor, ...]) -> None:
            own.append(inputs[0])

        modules = [block.get_submodule(name) for name in ("attention.output", "mlp.down")]
        hooks = [module.register_forward_pre_hook(partial(keep, inner)) for module in modules]
        y = block(x)
        for hook in hooks:
            hook.remove()
        lost = 1 - (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
        assert found.layers[layer] == pytest.approx(float(lost.mean()), abs=1e-12)
        output, down = (block.get_parameter(f"{name}.weight") for name in ("attention.output", "mlp.down"))
        size = whole.head_dim
        for head in range(whole.num_heads):
            part = slice(head * size, (head + 1) * size)
            added = inner[0][..., part] @ output[:, part].t()
            wanted = math.sqrt(float(added.square().sum()) / num_tokens)
            assert float(found.units[layer]["heads"][head]) == pytest.approx(wanted, rel=1e-10)
        for channel in range(0, whole.intermediate_size, 7):
            added = inner[1][..., channel, None] * down[:, channel]
            wanted = math.sqrt(float(added.square().sum()) / num_tokens)
            assert float(found.units[layer]["intermediate"][channel]) == pytest.approx(wanted, rel=1e-10)
        x = y


@torch.no_grad()
def test_importance_of_the_channels_of_experts() -> None:
    """A channel's importance is how far the output of the routed experts moves when it is set to zero alone."""
    whole = parse_model(TABLES["mixtral"] | {"num_hidden_layers": 1})
    value = our_values(whole)
    found, blocks = measured(whole, value).units[0]["expert_intermediate"], built(whole, value)
    mixture, tokens = blocks[1].get_submodule("mlp"), torch.randn(57, whole.hidden_size).double()
    meter = Meter(whole)
    with meter.attached(blocks):
        blocks[1](blocks[0](TOKENS))
    assert torch.equal(meter.importance.units[0]["expert_intermediate"], found)
    meter = Meter(whole)
    with meter.attached(blocks):
        before = mixture(tokens)
    # The layer itself has not run, so sums are over one token.
    sums = meter.importance.units[0]["expert_intermediate"]
    down = mixture.get_parameter("down.weight")
    for expert, channel in ((0, 0), (3, 17), (5, 36)):
        column = down[expert, :, channel].clone()
        down[expert, :, channel] = 0
        moved = float((mixture(tokens) - before).norm())
        down[expert, :, channel] = column
        assert float(sums[expert, channel]) == pytest.approx(moved, rel=1e-9)


def test_several_shared_experts_keep_their_number() -> None:
    """Families give their number and the size of one; a shared expert of another size keeps its share."""
    experts = parse_model(TABLES["mixtral"]).experts
    assert experts is not None
    for shared, wanted in ((2 * 37, 2 * 19), (3 * 37, 3 * 19), (50, 25), (0, 0)):
        found = Shares(intermediate=0.5)._experts(replace(experts, intermediate_size=37, shared_size=shared))
        assert (found.intermediate_size, found.shared_size) == (19, wanted)


def test_equal_units_keep_the_first() -> None:
    whole = parse_model(TABLES["llama"])
    units = {HEADS: torch.ones(2), "intermediate": torch.ones(37)}
    alike = Importance(layers=torch.ones(2), units=(units, units))
    kept = Shares(layers=0.5, heads=0.5, intermediate=0.1).chosen(whole, alike)
    assert kept.layers == (0,)
    assert {name: own.tolist() for name, own in kept.units[0].items()} == {HEADS: [0], "intermediate": [0, 1, 2, 3]}


def test_a_folder_is_pruned_by_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = write_folder(tmp_path / "whole")
    (tmp_path / "text.txt").write_text(TEXT * 20)
    words = ["prune", str(whole), str(tmp_path / "made"), "--data", str(tmp_path / "text.txt")]
    words += ["--layers", "0.667", "--heads", "0.5", "--intermediate", "0.5"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "a qwen3 model in bf16: 2 layers, 2 heads on 1 key-value head, 15 inner features; " in said
    made = Pretrained(tmp_path / "made")
    made.check()
    assert made.dtype == "bf16"
    assert json.loads((tmp_path / "made" / "config.json").read_text())["eos_token_id"] == [0, 2]
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "made" / name).read_bytes() == (whole / name).read_bytes()
    # The loss that it prints is that of the folder it wrote.
    loss = said.partition(" of the whole model, ")[2].split()[0]
    assert main(["eval", str(tmp_path / "made"), "--data", str(tmp_path / "text.txt"), "--json"]) == 0
    assert f"{json.loads(capsys.readouterr().out)['loss']:.4f}" == loss
    words[2] = str(tmp_path / "again")
    assert main(words) == 0
    assert bytes_of(tmp_path / "again") == bytes_of(tmp_path / "made")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "nothing would be removed: give --layers, --heads or --intermediate below 1"),
        ("--intermediate 0", "--intermediate 0.0 must be above 0 and at most 1: the share that stays"),
        ("--intermediate 1.5", "--intermediate 1.5 must be above 0 and at most 1"),
        ("--layers nan", "--layers nan must be above 0 and at most 1"),
        ("--intermediate 0.01", "--intermediate 0.01 of 30 inner features leaves none: give at least 0.033"),
        ("--layers 0.5", "--layers 0.5 of 3 layers is 1.5, no whole number of them: give 0.3333 (1) or 0.6667 (2)"),
        ("--layers 0.01", "--layers 0.01 of 3 layers is 0.03, no whole number of them: give 0.3333 (1)"),
        ("--heads 0.8", "--heads 0.8 of 2 key-value heads is 1.6, no whole number of them: give 0.5 (1) or 1 (2)"),
        ("--layers 0.999", "--layers 0.999 of 3 layers is 2.997, no whole number of them: give 0.6667 (2) or 1 (3)"),
        ("--intermediate 0.99", "--intermediate 0.99 of 30 inner features leaves all: give at most 0.9667, or leave"),
        ("--heads half", "argument --heads: invalid float value: 'half'"),
        ("--layers 0.667 --shard-bytes 0", "--shard-bytes 0 must be at least 1"),
        ("--layers 0.667 --documents 0", "--documents 0 must be at least 1"),
    ],
)
def test_shares_that_leave_no_unit_are_refused(
    words: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = write_model(tmp_path / "whole")
    (tmp_path / "text.txt").write_text(TEXT)
    command = ["prune", str(whole), str(tmp_path / "made"), "--data", str(tmp_path / "text.txt"), *words.split()]
    assert main(command) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.strip().splitlines()) == 1
    assert not (tmp_path / "made").exists()


def test_folders_that_cannot_be_pruned_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole, text = write_folder(tmp_path / "whole"), tmp_path / "text.txt"
    text.write_text(TEXT)

    def refusal(*words: str) -> str:
        assert main(["prune", *words]) == 2
        said = capsys.readouterr().err.strip()
        assert len(said.splitlines()) == 1
        return said

    half = ("--intermediate", "0.5")
    assert "text.txt is there and not an empty folder: name a new one" in refusal(str(whole), str(text), *half)
    # Before an evaluation of hours, not after it.
    inside = (str(whole), str(text / "made"), *half, "--data", str(text))
    assert f"PATH {text / 'made' / 'config.json'} cannot be written (Not a directory)" in refusal(*inside)
    assert "is not a run folder, so it has no data of its own: give --data PATH" in refusal(
        str(whole), str(tmp_path / "made"), *half
    )
    assert "--documents has no effect on a run's own evaluation data" in refusal(
        str(whole), str(tmp_path / "made"), *half, "--documents", "3"
    )


@pytest.mark.parametrize(
    ("name", "shares", "message"),
    [
        ("olmo2", Shares(heads=0.5), "--heads 0.5: olmo2 normalises the queries of all heads as one"),
        ("gpt2", Shares(heads=0.5), "--heads 0.5: a gpt2 config.json has no key for the size of a head"),
        ("llama 3.1, 1 kv head", Shares(heads=0.5), "0.5 of 1 key-value heads is 0.5, no whole number"),
    ],
)
def test_what_a_family_cannot_say_is_refused(name: str, shares: Shares, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        shares.narrowed(parse_model(TABLES[name]))
