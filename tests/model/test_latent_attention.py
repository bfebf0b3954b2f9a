"""Latent attention: its absorbed form, a model by the name of Kimi, and layers that only its files have."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.config import load_model, parse_model, to_table
from terrace.model.decoder import build_blocks
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initialise
from terrace.model.latent_attention import LatentAttention
from tests.support.families import TABLES, our_logits, our_values, their_logits, their_model

LATENT = [name for name in TABLES if name.startswith("deepseek_v3")]
KIMI_KEYS = {
    "ep_size": 1,
    "moe_layer_freq": 1,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "seq_aux": True,
    "aux_loss_alpha": 0.001,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
}


class Latents:
    """A cache of one row: the vector of each token, which is key and value of one head for all queries."""

    continues = True

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def attend(self, query: Tensor, key: Tensor, value: Tensor, plan: object) -> Tensor:
        assert key is value
        self.kept = key if self.kept is None else torch.cat([self.kept, key], 2)
        seen, new = self.kept.shape[2], key.shape[2]
        scores = query @ self.kept.transpose(2, 3) / query.shape[-1] ** 0.5
        beyond = torch.arange(seen) > torch.arange(seen - new, seen)[:, None]
        mixed: Tensor = scores.masked_fill(beyond, -torch.inf).softmax(-1) @ self.kept
        return mixed


@pytest.mark.parametrize("name", LATENT)
def test_absorbed_products_give_the_same(name: str) -> None:
    config = parse_model(TABLES[name])
    blocks = build_blocks(config, "cpu", torch.float64)
    initialise(blocks, config, 3, torch.float64)
    attention: Any = blocks[1].attention
    assert isinstance(attention, LatentAttention)
    x = torch.randn(1, 9, config.hidden_size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    whole, cache, parts = attention(x), Latents(), []
    for first, last in ((0, 4), (4, 5), (5, 9)):
        places = torch.arange(first, last)[None]
        parts.append(attention(x[:, first:last], places, cache))
    assert cache.kept is not None
    assert cache.kept.shape == (1, 1, 9, config.latent.key_value_rank + config.rotary_dim)
    assert (torch.cat(parts, 1) - whole).abs().max() <= 1e-12 * whole.abs().max()


def test_kimi_comes_in_and_goes_out_by_name(tmp_path: Path) -> None:
    table = TABLES["deepseek_v3, yarn, biases"]
    their_model(tmp_path / "theirs", table)
    file = tmp_path / "theirs" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_type": "kimi_k2", **KIMI_KEYS}))
    pretrained = Pretrained(tmp_path / "theirs")
    pretrained.check()
    here = our_logits(pretrained.config, pretrained.value, torch.float64)
    write_pretrained(tmp_path / "ours", pretrained.config, pretrained.value, "fp64")
    written = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("kimi_k2", ["DeepseekV3ForCausalLM"])
    assert load_model(str(tmp_path / "ours")) == pretrained.config
    # transformers has the layer under the other name alone.
    (tmp_path / "ours" / "config.json").write_text(json.dumps(written | {"model_type": "deepseek_v3"}))
    there = their_logits(tmp_path / "ours", torch.float64)
    assert (here - there).abs().max() <= 1e-10 * there.abs().max()


def test_a_layer_for_further_tokens_is_left_out(tmp_path: Path) -> None:
    config = parse_model(TABLES["deepseek_v3"])
    write_pretrained(tmp_path, config, our_values(config), "fp64")
    (path,) = tmp_path.glob("*.safetensors")
    tensors = safetensors.torch.load_file(path)
    further = {"model.layers.2.eh_proj.weight": torch.ones(24, 48), "model.layers.2.enorm.weight": torch.ones(24)}
    safetensors.torch.save_file(tensors | further, path)
    Pretrained(tmp_path).check()
    assert to_table(config)["num_nextn_predict_layers"] == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 2}, "num_key_value_heads = 2 is not implemented with latent .* set it to 4"),
        ({"kv_lora_rank": 0}, "kv_lora_rank = 0 must be at least 1"),
        ({"q_lora_rank": -1}, "q_lora_rank = -1 must be at least 0"),
        ({"v_head_dim": 0}, "v_head_dim = 0 must be at least 1"),
        ({"v_head_dim": 12}, "v_head_dim = 12 is not implemented beyond the 11 elements"),
        ({"qk_nope_head_dim": 0}, "both parts must have elements"),
        ({"qk_rope_head_dim": 3}, "RoPE would rotate 3 elements"),
        ({"scoring_func": "softmax"}, "scoring_func = 'softmax' is not implemented: set it to .sigmoid."),
        ({"topk_method": "greedy"}, "topk_method = 'greedy' is not implemented"),
        ({"moe_layer_freq": 2}, "moe_layer_freq = 2 is not implemented"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "mscale_all_dim": "x"}}, "must be a number"),
    ],
)
def test_refusals_name_key_value_and_fix(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_model(TABLES["deepseek_v3"] | change)


def test_another_family_cannot_say_it() -> None:
    config = parse_model(TABLES["deepseek_v3"])
    with pytest.raises(ModelError, match="cannot say"):
        to_table(replace(config, family="glm4_moe"))
