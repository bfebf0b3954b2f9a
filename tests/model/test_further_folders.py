"""Layers that predict further tokens, in and out of folders of published models, shrunk."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from terrace.base.errors import ModelError
from terrace.model.blocks import block_specs
from terrace.model.config import load_model, parse_model
from terrace.model.decoder import FurtherTokenLayer, build_blocks, token_loss
from terrace.model.facts import next_token_alone
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.model.init import initialise
from terrace.model.kinds import Scales
from terrace.runtime.further_tokens import further_tokens
from tests.support.families import in_fp64
from tests.support.further_reference import Reference
from tests.support.generation import MODELS
from tests.support.published import PUBLISHED

_SMALL: dict[str, Any] = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 37, "num_attention_heads": 4}
_SMALL |= {"num_hidden_layers": 2, "moe_intermediate_size": 14, "n_routed_experts": 8, "num_experts_per_tok": 3}
_SMALL |= {"num_nextn_predict_layers": 1, "initializer_range": 0.3, "first_k_dense_replace": 1}
_LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 10, "q_lora_rank": 14, "qk_rope_head_dim": 4, "v_head_dim": 9}
_LATENT |= {"qk_nope_head_dim": 8}
_SHRUNK: dict[str, dict[str, Any]] = {
    "GLM-4.5-Air": _SMALL | {"num_key_value_heads": 2, "head_dim": 12},
    "DeepSeek-V3": _SMALL | _LATENT | {"n_group": 4, "topk_group": 2},
    "Kimi-K2": _SMALL | _LATENT,
}


@pytest.mark.parametrize("name", _SHRUNK)
def test_layers_for_further_tokens_come_in_and_go_out(tmp_path: Path, name: str) -> None:
    """Losses of three published configurations, shrunk, from the files that Terrace writes."""
    config = parse_model(PUBLISHED[name][0] | _SHRUNK[name])
    blocks = build_blocks(config, "cpu", torch.float64)
    initialise(blocks, config, 5, torch.float64)
    own = {
        (spec.name, param.name): block
        for spec, block in zip(block_specs(config), blocks, strict=True)
        for param in spec.params
    }
    written = write_pretrained(tmp_path, config, lambda block, param: own[block, param].get_parameter(param), "fp64")
    # Released folders repeat embedding and output matrix in these layers.
    (file,) = tmp_path.glob("*.safetensors")
    stored = safetensors.torch.load_file(file)
    copies = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    copied = {f"model.layers.2.{name}.weight": stored[f"{of}.weight"].clone() for name, of in copies.items()}
    assert written
    assert not copied.keys() & stored.keys()
    safetensors.torch.save_file(stored | copied, file)
    pretrained = Pretrained(tmp_path, config)
    pretrained.check()
    for (block, param), module in own.items():
        assert torch.equal(pretrained.value(block, param), module.get_parameter(param))
    # Without training they are left out, and a folder may lack them.
    plain = load_model(str(tmp_path), training=False)
    assert plain == next_token_alone(config)
    Pretrained(tmp_path, plain).check()
    tokens = torch.randint(0, 61, (1, 9), generator=torch.Generator().manual_seed(1))
    ahead, later = further_tokens(tokens[:, :-1], tokens[:, 1:], None, 1)
    x = tokens[:, :-1]
    for module in blocks[:-1]:
        x = module(x, None, ahead[..., 0]) if isinstance(module, FurtherTokenLayer) else module(x)
    weight = blocks[-1].get_parameter("weight")
    losses = [
        token_loss(part @ weight.t(), labels)
        for part, labels in zip(x.chunk(2, -1), (tokens[:, 1:], later[..., 0]), strict=True)
    ]
    (tmp_path / "config.json").write_text(json.dumps(_as_deepseek(tmp_path)))
    with in_fp64():
        wanted = Reference(tmp_path, 1).losses(tokens[:, :-1], tokens[:, 1:])
    assert [float(each.detach()) for each in losses] == pytest.approx(
        [float(each.detach()) for each in wanted], abs=1e-10
    )
    kept = {name: value for name, value in stored.items() if not name.startswith("model.layers.2.")}
    safetensors.torch.save_file(kept, file)
    with pytest.raises(ModelError, match=r"lacks model.layers.2.* give --model.num_nextn_predict_layers 0 where"):
        Pretrained(tmp_path, config).check()


def _as_deepseek(folder: Path) -> dict[str, Any]:
    # transformers has the layers of kimi_k2 under the other name alone.
    table: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return table | ({"model_type": "deepseek_v3"} if table["model_type"] == "kimi_k2" else {})


@pytest.mark.parametrize("number", [-1, 9, 1.5, True])
def test_other_numbers_of_layers_are_refused(number: float) -> None:
    table = PUBLISHED["GLM-4.5-Air"][0] | {"num_nextn_predict_layers": number}
    with pytest.raises(ModelError, match=f"num_nextn_predict_layers = {number} must"):
        parse_model(table)


_OTHERS = {
    "linear layers among others": MODELS["linear"],
    "norms of outputs": MODELS["norms after, scaled"],
    "logits that are divided": replace(MODELS["llama"], scales=Scales(logit_divisor=2.0)),
    "one number a token": replace(MODELS["glm4_moe"], scalar_head=True),
}


@pytest.mark.parametrize("name", _OTHERS)
def test_models_without_such_layers_are_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"num_nextn_predict_layers = 1 is not implemented for .*: set it to 0"):
        replace(_OTHERS[name], num_mtp_layers=1)
