"""Capped scores, windows and RoPE by layer, RoPE that follows the longest row, adapters of fused parts."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from terrace.base.errors import ModelError
from terrace.model.attention import Capped, attend, document_begins, whole_mask
from terrace.model.attention_kernel import AttentionCase, AttentionKernel, candidates, refusal
from terrace.model.attention_plans import AttentionPlans, describe, make_plan
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.hf.names import sources
from terrace.model.kinds import LayerKind, Scales
from terrace.model.layers import Attention
from terrace.model.lora.config import LoraConfig
from terrace.model.lora.peft import _by_module, _joined
from terrace.model.rope_scaling import RopeScaling
from terrace.model.rotary import Rotary
from tests.support.families import TABLES

CPU, CAP = torch.device("cpu"), 0.5
POSITIONS = torch.tensor([[*range(70), *range(50), 0, 1, *range(8)]])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_definition(query: Tensor, key: Tensor, value: Tensor, window: int) -> Tensor:
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, 1) for part in (key, value))
    scores = CAP * torch.tanh(query @ key.transpose(2, 3) / query.shape[3] ** 0.5 / CAP)
    return (scores + whole_mask(document_begins(POSITIONS), window, torch.float64)).softmax(-1) @ value


@pytest.mark.parametrize("window", [0, 20])
def test_scores_are_capped_by_every_plan(window: int) -> None:
    size = POSITIONS.shape[1]
    parts = [normal(1, heads, size, 16, seed=heads).requires_grad_() for heads in (4, 2)]
    parts.append(normal(1, 2, size, 16, seed=9).requires_grad_())
    wanted = by_definition(parts[0], parts[1], parts[2], window)
    gradients = torch.autograd.grad(wanted.square().sum(), parts)
    kernels: tuple[AttentionKernel, ...] = ("sdpa", "pieces")
    for kernel in kernels:
        plan = make_plan(kernel, document_begins(POSITIONS), window, CPU, torch.float64, CAP)
        assert isinstance(plan, Capped)
        found = attend(parts[0], parts[1], parts[2], plan)
        torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)
        for one, other in zip(torch.autograd.grad(found.square().sum(), parts), gradients, strict=True):
            torch.testing.assert_close(one, other, atol=1e-11, rtol=0)


def test_kernels_that_cannot_cap_are_not_chosen() -> None:
    case = AttentionCase("cuda", "bf16", 64, True, True, True)
    assert candidates(case) == ("flex", "sdpa")
    assert candidates(replace(case, is_capped=False))[0] == "varlen"
    assert "cannot cap scores" in refusal("varlen", case)
    assert "two products and a softmax of capped scores" in describe(CPU, torch.float32, 64, is_capped=True)
    plan = AttentionPlans(0, cap=CAP).plan(None, normal(1, 2, 8, 4))
    assert plan == Capped(None, CAP)


def attentions_of(config: ModelConfig) -> list[Attention]:
    return [each for block in build_blocks(config) for each in block.modules() if isinstance(each, Attention)]


def test_layers_share_what_they_have_in_common() -> None:
    """A table of RoPE and a mask plan for each kind of layer, not for each layer."""
    config = parse_model(TABLES["gemma3_text"] | {"num_hidden_layers": 6})
    attentions = attentions_of(config)
    plans = [each.plans for each in attentions]
    assert [each.window for each in plans if isinstance(each, AttentionPlans)] == [5, 0] * 3
    assert len({id(each) for each in plans}) == len({id(each.rotary) for each in attentions}) == 2
    assert [each.rotary.theta for each in attentions if each.rotary is not None] == [30.0, 900.0] * 3
    assert [each.rotary is None for each in attentions_of(parse_model(TABLES["smollm3"]))] == [False, True]


LONG = RopeScaling(
    rope_type="longrope", original_max_position_embeddings=12, short_factor=(1.0, 1.1), long_factor=(2.0, 3.0)
)


def test_rope_that_follows_the_longest_row() -> None:
    """Rows without documents have their own length; positions of documents must lie within the limit."""
    rotary, x = Rotary(4, 100.0, LONG, limit=12), normal(1, 2, 20, 4)
    short, long = (Rotary(4, 100.0, replace(LONG, long_factor=each)) for each in (LONG.short_factor, LONG.long_factor))
    assert torch.equal(rotary(x[:, :, :12]), short(x[:, :, :12]))
    assert torch.equal(rotary(x), long(x))
    assert not torch.equal(rotary(x), short(x))
    positions = torch.tensor([[*range(12), *range(8)]])
    assert torch.equal(rotary(x, positions), short(x, positions))
    with pytest.raises(
        ModelError, match=r"a document has position 12, and longrope RoPE changes its frequencies from 12"
    ):
        rotary(x, positions + 1)


YARN = RopeScaling(rope_type="yarn", factor=2.0, original_max_position_embeddings=9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": replace(LONG, long_factor=(1.0,))}, "short_factor .* has 2 numbers, and 6 .* need 3"),
        ({"rope_scaling": RopeScaling(rope_type="dynamic", factor=2.0), "rotary_dim": 2}, "more than 2 rotated"),
        ({"kinds": (LayerKind(rope_theta=9.0),) * 3}, "kinds has 3 entries, and the model 2 layers: give one for each"),
        ({"kinds": (LayerKind(rope_theta=9.0),) * 2}, "kinds are all alike: leave them out"),
        ({"kinds": (LayerKind(sliding_window=3), LayerKind(sliding_window=4))}, "must be the widest .* windows, 4"),
        ({"norms": "both", "parallel_residual": True}, "norms = 'both' is implemented for rms norms and serial"),
        ({"rope_scaling": YARN, "rope_theta": 1.0}, "rope_theta = 1.0 must be above 1 for yarn"),
        ({"whole_qk_norm": True}, "whole_qk_norm needs qk_norm"),
    ],
)
def test_what_no_layer_can_be_is_refused(changes: dict[str, object], message: str) -> None:
    config = parse_model(TABLES["llama"])
    with pytest.raises(ModelError, match=message):
        replace(config, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Scales(residual=0.0), r"scales.residual = 0.0 must be positive"),
        (lambda: Scales(attention_cap=-1.0), r"scales.attention_cap = -1.0 must be at least 0"),
        (lambda: replace(LONG, short_factor=(0.0,)), "short_factor of longrope RoPE scaling has 0.0"),
        (lambda: RopeScaling(rope_type="yarn", original_max_position_embeddings=0), "must be at least 1"),
        (
            lambda: RopeScaling(rope_type="yarn", original_max_position_embeddings=9, beta_fast=1.0, beta_slow=2.0),
            "beta_fast = 1.0 .* must be at least beta_slow = 2.0",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(make: object, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        make()  # type: ignore[operator]


BAD = {"rope_type": "yarn", "factor": 2.0}
LISTS = {"rope_type": "longrope", "short_factor": [1, 1, 1], "long_factor": [1, 1, 1]}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "smollm3",
            {"no_rope_layers": [1]},
            r"no_rope_layers = \[1\] must have a 1 .* or a 0 for each of the 2",
        ),
        ("smollm3", {"no_rope_layers": [1, 2]}, "must have a 1"),
        (
            "smollm3",
            {"no_rope_layers": None, "no_rope_layer_interval": 0},
            "interval = 0 must be at least",
        ),
        ("granite", {"logits_scaling": 0}, "logits_scaling = 0.0 must be positive"),
        ("granite", {"attention_multiplier": -1}, "attention_multiplier = -1.0 must be positive"),
        (
            "phi3",
            {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
            "use default or longrope",
        ),
        ("llama, yarn", {"rope_parameters": BAD | {"original_max_position_embeddings": 1.5}}, "1.5 must be an integer"),
        ("llama, yarn", {"rope_parameters": BAD | {"truncate": 1}}, "truncate = 1 must be true or false"),
        ("llama, yarn", {"rope_parameters": BAD | {"mscale": "x"}}, "mscale = 'x' must be a number"),
        (
            "llama, longrope",
            {"rope_parameters": {"rope_type": "longrope", "short_factor": 3}},
            "long_factor is missing",
        ),
        ("llama, longrope", {"rope_parameters": LISTS | {"short_factor": 3}}, "short_factor = 3 must be a list"),
        ("llama, longrope", {"rope_parameters": LISTS | {"short_factor": [1, "a", 2]}}, r"factor\[1\] = 'a' must be a"),
        (
            "gemma3_text",
            {"sliding_window": None},
            "sliding_window = None needs layer_types, all of them 'full_attention'",
        ),
        ("gemma3_text", {"rope_parameters": {"full_attention": 3}}, "rope_parameters = 3 must be a table or null"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0.0 must be positive"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True is not implemented"),
        (
            "gemma2",
            {"layer_types": ["full_attention"]},
            "name .* for each of the 2 layers",
        ),
        ("gemma3_text", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping = 3.0 is not implemented"),
        (
            "gemma3_text",
            {"rope_parameters": {"rope_type": "default"}},
            "must have a table 'full_attention'",
        ),
        ("gemma3_text", {"model_type": "gemma3"}, "it has images too; its text model alone is model_type gemma3_text"),
    ],
)
def test_files_that_are_not_implemented_are_refused_by_key(name: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message) as found:
        parse_model(TABLES[name] | change)
    assert "\n" not in str(found.value)


def test_an_adapter_of_a_fused_matrix_has_rows_where_its_parts_are() -> None:
    """Phi-3's query, key and value have other numbers of rows: B A of the joined adapter is that of each part."""
    config: ModelConfig = parse_model(TABLES["phi3"])
    lora = LoraConfig(rank=2, alpha=2.0, targets=("*.attention.query.*", "*.attention.value.*"))
    parts = _by_module(config, lora)["model.layers.0.self_attn.qkv_proj"]
    shapes = {param.name: param.shape for param in block_specs(config)[1].params}
    drawn: dict[str, Tensor] = {}

    def value(block: str, name: str) -> Tensor:
        weight = name.rpartition(".")[0] + ".weight"
        out, into = shapes[weight]
        shape = (2, into) if name.endswith("lora_a") else (out, 2)
        return drawn.setdefault(name, normal(*shape, seed=len(drawn)).float())

    down, up = _joined(parts, value)
    whole, source = up @ down, sources(config)["layers.0", "attention.value.weight"]
    assert whole.shape == source.shape
    rows = source.parts
    one = {name: drawn[f"attention.{name}.lora_b"] @ drawn[f"attention.{name}.lora_a"] for name in ("query", "value")}
    torch.testing.assert_close(whole[: rows[0]], one["query"])
    torch.testing.assert_close(whole[rows[0] + rows[1] :], one["value"])
    assert not whole[rows[0] : rows[0] + rows[1]].any()
