"""Attention sinks by their definition, and weights in MXFP4 as `transformers` reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.attention import document_begins, first_keys
from terrace.model.attention_kernel import AttentionKernel
from terrace.model.attention_plans import AttentionPlans
from terrace.model.config import load_model, parse_model
from terrace.model.fused_attention import BlockMasked
from terrace.model.hf.mxfp4 import unpacked
from terrace.model.hf.pretrained import Pretrained
from terrace.model.hf.written import write_pretrained
from terrace.model.sinks import attend
from tests.support.families import TABLES, loaded, our_logits, their_logits, their_model
from tests.support.nightly import nightly
from tests.virtual_cuda.rank import DEVICE
from tests.virtual_cuda.rehearsal import rehearsed

SEQUENCE = 140
PLACES = torch.arange(SEQUENCE)
WHOLE = torch.stack([PLACES, PLACES])
PACKED = torch.stack([PLACES - cut * (cut <= PLACES) for cut in (3, 100)])


def by_definition(parts: list[Tensor], positions: Tensor, window: int) -> Tensor:
    """A softmax over the scores of the keys and one more score, whose value is zero."""
    query, key, value, sinks = parts
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    begins, behind = PLACES - positions, PLACES.unsqueeze(1) - PLACES
    seen = (behind >= 0) & (begins.unsqueeze(2) == begins.unsqueeze(1)) & ((behind < window) if window else True)
    scores = (query @ key.mT / query.shape[-1] ** 0.5).masked_fill(~seen.unsqueeze(1), -torch.inf)
    column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ value


def normal(dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    """Query, key, value and sinks."""
    numbers = torch.Generator().manual_seed(seed)
    shapes = (2, 4, SEQUENCE, 16), (2, 2, SEQUENCE, 16), (2, 2, SEQUENCE, 16), (4,)
    return [torch.randn(*shape, generator=numbers, dtype=torch.float64).to(dtype) for shape in shapes]


def with_gradients(run: Any, parts: list[Tensor]) -> list[Tensor]:
    own = [part.clone().requires_grad_() for part in parts]
    output = run(own)
    torch.autograd.backward(output.square().sum())
    return [each.detach().cpu().double() for each in (output, *(part.grad for part in own if part.grad is not None))]


@pytest.mark.parametrize("window", [0, 5, *nightly(70)])
@pytest.mark.parametrize("positions", [WHOLE, PACKED], ids=["whole", "packed"])
@pytest.mark.parametrize("kernel", ["auto", "sdpa"])
def test_a_sink_is_a_key_of_value_zero(kernel: Any, positions: Tensor, window: int) -> None:
    parts = normal(torch.float64)
    given = None if positions is WHOLE else positions
    plan = AttentionPlans(window, is_grouped=True, choice=kernel).plan(given, parts[0])
    found = with_gradients(lambda own: attend(own[0], own[1], own[2], plan, own[3]), parts)
    for own, wanted in zip(
        found, with_gradients(lambda own: by_definition(own, positions, window), parts), strict=True
    ):
        torch.testing.assert_close(own, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_kernels_for_cuda_take_sinks(kernel: AttentionKernel, window: int) -> None:
    """By the definitions of these kernels, with what this project passes to them."""
    dtype = torch.bfloat16 if kernel == "varlen" else torch.float32
    parts, within = normal(dtype), 3e-2 if kernel == "varlen" else 1e-4
    wanted = with_gradients(lambda own: by_definition(own, PACKED, window), [each.float() for each in parts])
    with rehearsed() as rehearsal:
        plans = AttentionPlans(window, is_grouped=True, choice=kernel)
        plan = plans.plan(PACKED.to(DEVICE), parts[0].to(DEVICE))
        found = with_gradients(
            lambda own: attend(own[0], own[1], own[2], plan, own[3]), [each.to(DEVICE) for each in parts]
        )
        assert not rehearsal.faults, rehearsal.findings.told()
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other, rtol=within, atol=within * float(other.abs().max()))


@pytest.mark.nightly
def test_torch_returns_the_log_sums_of_flex_attention() -> None:
    parts = normal(torch.float64)
    plan = BlockMasked.of(first_keys(document_begins(PACKED), 5))
    found = attend(parts[0], parts[1], parts[2], plan, parts[3])
    torch.testing.assert_close(found, by_definition(parts, PACKED, 5), rtol=1e-10, atol=1e-12)


def packed(number: int, rows: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Blocks, scales, and the values that they stand for, element by element, by the standard."""
    numbers = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (number, rows, groups, 32), generator=numbers)
    scales = torch.randint(118, 132, (number, rows, groups), generator=numbers)
    values = torch.empty(codes.shape, dtype=torch.float64)
    for place, code in enumerate(codes.flatten().tolist()):
        sign, exponent, mantissa = code >> 3, (code >> 1) & 3, code & 1
        value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
        values.view(-1)[place] = -value if sign else value
    values *= 2.0 ** (scales.double() - 127).unsqueeze(-1)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    return blocks.to(torch.uint8), scales.to(torch.uint8), values.flatten(-2).transpose(1, 2).contiguous()


def test_mxfp4_is_unpacked_as_transformers_does() -> None:
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    blocks, scales, values = packed(3, 10, 2, seed=0)
    scales[0, 0] = torch.tensor([0, 254])  # from the smallest to the largest
    found = unpacked(blocks, scales).transpose(1, 2)
    assert torch.equal(found, mxfp4.convert_moe_packed_tensors(blocks, scales))
    assert torch.equal(found[1:].double(), values[1:])


def test_a_folder_in_mxfp4_is_read_as_its_values(tmp_path: Path) -> None:
    """Packed by hand, with the names of the published files; written without the packing, in words."""
    table = TABLES["gpt_oss, 20b"] | {"hidden_size": 32, "intermediate_size": 32}
    their_model(tmp_path / "plain", table, torch.bfloat16)
    file = tmp_path / "plain" / "model.safetensors"
    stored = safetensors.torch.load_file(file)
    wanted = dict(stored)
    for place, name in enumerate([name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]):
        number, inputs, outputs = stored.pop(name).shape
        blocks, scales, values = packed(number, outputs, inputs // 32, seed=place)
        wanted[name] = values.to(torch.bfloat16)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.torch.save_file(wanted, file, metadata={"format": "pt"})
    (tmp_path / "packed").mkdir()
    settings = json.loads((tmp_path / "plain" / "config.json").read_text())
    settings["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(settings))
    safetensors.torch.save_file(stored, tmp_path / "packed" / "model.safetensors")

    pretrained, plain = Pretrained(tmp_path / "packed"), Pretrained(tmp_path / "plain")
    pretrained.check()
    assert pretrained.config == load_model(str(tmp_path / "plain"))
    some = pretrained.value("layers.1", "mlp.up.weight", [5, 2])
    assert torch.equal(some, plain.value("layers.1", "mlp.up.weight")[[5, 2]])
    found = our_logits(pretrained.config, pretrained.value, torch.float64)
    torch.testing.assert_close(found, their_logits(tmp_path / "plain", torch.float64), rtol=0, atol=1e-8)
    with pytest.warns(UserWarning, match="packed has weights in MXFP4; they are written as bf16, without it"):
        write_pretrained(tmp_path / "ours", pretrained.config, pretrained.value, "bf16", source=tmp_path / "packed")
    assert "quantization_config" not in json.loads((tmp_path / "ours" / "config.json").read_text())
    theirs = dict(loaded(tmp_path / "ours", torch.bfloat16).named_parameters())
    assert all(torch.equal(theirs[name], value) for name, value in wanted.items())

    name, file = next(name for name in stored if name.endswith("_scales")), tmp_path / "packed" / "model.safetensors"
    scales = stored[name].clone()
    scales[1, -1] = 255
    safetensors.torch.save_file({**stored, name: scales}, file)
    with pytest.raises(ModelError, match=r"_scales has scales of 255, which stand for no number"):
        our_logits(pretrained.config, Pretrained(tmp_path / "packed").value, torch.float64)
    safetensors.torch.save_file({**stored, name: stored[name][:, :-1].contiguous()}, file)
    with pytest.raises(ModelError, match="MXFP4 has blocks of 16 bytes"):
        Pretrained(tmp_path / "packed").check()
    del stored[name]
    safetensors.torch.save_file(stored, file)
    with pytest.raises(ModelError, match=r"_blocks is there without .*_scales: download the weights again"):
        Pretrained(tmp_path / "packed")


def test_a_table_without_rope_has_the_yarn_of_transformers() -> None:
    table = {key: value for key, value in TABLES["gpt_oss, 20b"].items() if key != "rope_parameters"}
    scaling = parse_model(table).rope_scaling
    assert scaling is not None
    assert (scaling.rope_type, scaling.factor, scaling.truncate) == ("yarn", 32.0, False)
    assert scaling.original_max_position_embeddings == 4096
    assert parse_model(table).rope_theta == 150000.0
    assert parse_model(table | {"rope_parameters": {"rope_type": "default"}}).rope_scaling is None
