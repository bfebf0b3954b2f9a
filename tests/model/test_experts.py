"""Mixtures of experts on one device, against the layers of `transformers`, and in fp64 against finite differences."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from terrace.base.errors import ModelError
from terrace.model.blocks import block_specs, forward_flops, num_active_params, num_params
from terrace.model.config import ModelConfig, parse_model
from terrace.model.decoder import build_blocks
from terrace.model.experts.config import ExpertsConfig
from terrace.model.experts.gates import best, sigmoid
from terrace.model.experts.mixture import Mixture
from terrace.model.experts.products import Order, collect, spread
from terrace.model.lora.config import LoraConfig, targets

HIDDEN, INNER, EXPERTS, CHOSEN = 24, 20, 8, 3
DENSE = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 101,
        "hidden_size": HIDDEN,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 36,
    }
)
PLAIN = ExpertsConfig(num_experts=EXPERTS, per_token=CHOSEN, intermediate_size=INNER)
GROUPED = replace(PLAIN, gate="sigmoid", scale=1.5, num_groups=4, kept_groups=2, biased=True, shared_size=40)
SHARED = replace(PLAIN, normalized=False, shared_size=28, shared_gate=True)


def with_experts(experts: ExpertsConfig) -> ModelConfig:
    return replace(DENSE, experts=experts)


def filled(experts: ExpertsConfig, dtype: torch.dtype = torch.float32) -> Mixture:
    torch.manual_seed(1)
    mixture = Mixture(with_experts(experts), dtype=dtype)
    for param in mixture.parameters():
        nn.init.normal_(param, 0.0, 0.3)
    if mixture.router.bias is not None:
        mixture.router.bias.requires_grad_(False)
    return mixture


@pytest.mark.parametrize(
    "experts",
    [PLAIN, GROUPED, SHARED, replace(GROUPED, dense_layers=(0, 2)), replace(PLAIN, num_experts=1, per_token=1)],
)
def test_modules_have_the_parameters_that_specs_declare(experts: ExpertsConfig) -> None:
    config = with_experts(experts)
    for spec, block in zip(block_specs(config), build_blocks(config), strict=True):
        found = [(name, tuple(param.shape)) for name, param in block.named_parameters()]
        assert found == [(param.name, param.shape) for param in spec.params]
    dense = sum(spec.params == block_specs(DENSE)[1].params for spec in block_specs(config))
    assert dense == len(experts.dense_layers)


def theirs(experts: ExpertsConfig) -> nn.Module:
    """The layer of `transformers` that computes the same, with random values."""
    torch.manual_seed(2)
    sizes: dict[str, Any] = {"hidden_size": HIDDEN, "num_experts_per_tok": CHOSEN}
    if experts is GROUPED:
        from transformers.models.glm4_moe import configuration_glm4_moe, modeling_glm4_moe

        groups: dict[str, Any] = {
            "n_routed_experts": EXPERTS,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        }
        config: Any = configuration_glm4_moe.Glm4MoeConfig(
            moe_intermediate_size=INNER, n_shared_experts=2, **groups, **sizes
        )
        made: Any = modeling_glm4_moe.Glm4MoeMoE
    elif experts is SHARED:
        from transformers.models.qwen2_moe import configuration_qwen2_moe, modeling_qwen2_moe

        config = configuration_qwen2_moe.Qwen2MoeConfig(
            moe_intermediate_size=INNER, num_experts=EXPERTS, shared_expert_intermediate_size=28, **sizes
        )
        made = modeling_qwen2_moe.Qwen2MoeSparseMoeBlock
    else:
        from transformers.models.mixtral import configuration_mixtral, modeling_mixtral

        config = configuration_mixtral.MixtralConfig(intermediate_size=INNER, num_local_experts=EXPERTS, **sizes)
        made = modeling_mixtral.MixtralSparseMoeBlock
    config._experts_implementation = "eager"
    module: nn.Module = made(config)
    for value in [*module.parameters(), *module.buffers()]:
        nn.init.normal_(value, 0.0, 0.3)
    return module


def copy_from(layer: Any, mixture: Mixture) -> None:
    gate, up = layer.experts.gate_up_proj.chunk(2, 1)
    pairs: list[tuple[Tensor, Any]] = [
        (mixture.gate.weight, gate),
        (mixture.up.weight, up),
        (mixture.down.weight, layer.experts.down_proj),
    ]
    pairs.append((mixture.router.weight, layer.gate.weight))
    if mixture.router.bias is not None:
        pairs.append((mixture.router.bias, layer.gate.e_score_correction_bias))
    if mixture.shared is not None:
        shared = getattr(layer, "shared_experts", None) or layer.shared_expert
        for name in ("gate", "up", "down"):
            pairs.append((getattr(mixture.shared, name).weight, getattr(shared, f"{name}_proj").weight))
    if mixture.shared_gate is not None:
        pairs.append((mixture.shared_gate.weight, layer.shared_expert_gate.weight))
    with torch.no_grad():
        for ours, other in pairs:
            ours.copy_(other)


@pytest.mark.parametrize("experts", [PLAIN, GROUPED, SHARED])
def test_as_transformers(experts: ExpertsConfig) -> None:
    """Output, and the gradients of tokens, experts and router."""
    pytest.importorskip("transformers")
    layer, mixture = theirs(experts), filled(experts)
    copy_from(layer, mixture)
    x = torch.randn(2, 9, HIDDEN)
    outer = torch.randn(2, 9, HIDDEN)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [layer(inputs[0]), mixture(inputs[1])]
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-5, atol=1e-5)
    for output in outputs:
        (output * outer).sum().backward()
    other: Any = layer
    stacks = torch.cat([_grad(mixture.gate.weight), _grad(mixture.up.weight)], 1)
    for ours, wanted in [
        (_grad(inputs[1]), _grad(inputs[0])),
        (stacks, other.experts.gate_up_proj.grad),
        (_grad(mixture.down.weight), other.experts.down_proj.grad),
        (_grad(mixture.router.weight), other.gate.weight.grad),
    ]:
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad


@pytest.mark.parametrize("experts", [PLAIN, GROUPED, SHARED])
def test_gradients_are_differences(experts: ExpertsConfig) -> None:
    mixture = filled(experts, torch.float64)
    x = torch.randn(1, 5, HIDDEN, dtype=torch.float64, requires_grad=True)
    named = {name: param for name, param in mixture.named_parameters() if param.requires_grad}

    def run(x: Tensor, *values: Tensor) -> Any:
        return torch.func.functional_call(mixture, dict(zip(named, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, (x, *named.values()), fast_mode=True)


def test_every_expert_or_one_or_none() -> None:
    """All tokens for one expert leave the others a gradient of zero; with k = E every expert has every token."""
    mixture = filled(replace(PLAIN, per_token=1), torch.float64)
    with torch.no_grad():
        mixture.router.weight.zero_()
    x = torch.randn(1, 6, HIDDEN, dtype=torch.float64)
    mixture(x).sum().backward()
    touched = _grad(mixture.down.weight).abs().flatten(1).sum(1) > 0
    assert touched.tolist() == [True] + [False] * (EXPERTS - 1)  # of equal scores the lowest index
    whole = filled(replace(PLAIN, per_token=EXPERTS), torch.float64)
    shares = (x[0] @ whole.router.weight.T).softmax(-1)
    silu = torch.nn.functional.silu
    each = [
        (silu(x[0] @ gate.T) * (x[0] @ up.T)) @ down.T
        for gate, up, down in zip(whole.gate.weight, whole.up.weight, whole.down.weight, strict=True)
    ]
    wanted = sum(share.unsqueeze(1) * out for share, out in zip(shares.T, each, strict=True))
    torch.testing.assert_close(whole(x)[0], wanted, rtol=1e-12, atol=1e-12)


def test_no_token_at_all() -> None:
    assert filled(GROUPED)(torch.zeros(1, 0, HIDDEN)).shape == (1, 0, HIDDEN)


def test_equal_scores_go_to_the_lower_index() -> None:
    assert best(torch.tensor([[1.0, 2.0, 2.0, 1.0]]), 3).tolist() == [[1, 2, 0]]


def test_groups_hold_the_chosen_even_below_zero() -> None:
    """A bias may make every sum negative; an expert of a dropped group is still not taken."""
    logits, bias = torch.randn(50, EXPERTS), torch.full((EXPERTS,), -3.0)
    experts = sigmoid.choose(logits, bias, GROUPED).experts // 2
    assert all(len(set(row)) <= 2 for row in experts.tolist())


def test_rows_there_and_back() -> None:
    experts = torch.randint(0, EXPERTS, (7, CHOSEN))
    order = Order.of(experts, EXPERTS)
    rows = spread(torch.arange(7.0).unsqueeze(1), order)
    assert sum(order.counts) == len(rows) == 7 * CHOSEN
    owners = experts.flatten()[order.choices]
    assert owners.tolist() == sorted(owners.tolist())
    assert collect(rows, order).squeeze(1).tolist() == [CHOSEN * token for token in range(7)]


def test_cost_counts_the_experts_of_a_token() -> None:
    config = with_experts(replace(SHARED, dense_layers=(1,)))
    expert = 3 * HIDDEN * INNER
    assert num_params(config) - num_active_params(config) == 2 * (EXPERTS - CHOSEN) * expert
    whole = with_experts(replace(SHARED, per_token=EXPERTS, dense_layers=(1,)))
    assert [forward_flops(whole, block, 2, 5) - forward_flops(config, block, 2, 5) for block in range(5)] == [
        0,
        *(2 * 10 * (EXPERTS - CHOSEN) * expert * mixture for mixture in (1, 0, 1)),
        0,
    ]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"per_token": 9}, "per_token = 9 must be at most the 8 experts"),
        ({"per_token": 0}, "per_token = 0 must be at least 1"),
        ({"num_experts": 10**9}, "num_experts = 1000000000 must be at most 65536"),
        ({"num_groups": 3}, "num_groups = 3 does not divide num_experts = 8"),
        ({"num_groups": 8}, "num_groups = 8 of num_experts = 8 leaves a group fewer than the two"),
        ({"kept_groups": 2}, "kept_groups = 2 must be at most num_groups = 1"),
        ({"num_groups": 4, "per_token": 3}, "at most the 2 experts in kept_groups = 1 of num_groups = 4"),
        ({"gate": "softmaxx"}, "gate = softmaxx is not implemented"),
        ({"scale": 0.0}, "scale = 0.0 must be positive"),
        ({"dense_layers": (3,)}, "dense_layers names layer 3 of 3"),
        ({"dense_layers": (0, 1, 2)}, "dense_layers leaves no layer its experts"),
    ],
)
def test_what_is_no_mixture(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        with_experts(replace(PLAIN, **changed))


def test_adapters_on_experts_are_refused() -> None:
    specs = block_specs(with_experts(SHARED))
    for pattern in ("layers.*", "layers.1.mlp.router.weight", "*.mlp.down.weight"):
        with pytest.raises(ModelError, match="adapters on experts or their router are not implemented: name other"):
            targets(specs, LoraConfig(rank=2, targets=(pattern,)))
    chosen = targets(specs, LoraConfig(rank=2, targets=("*.attention.*", "*.mlp.shared.up.*")))
    assert len(chosen) == 3 * 5
