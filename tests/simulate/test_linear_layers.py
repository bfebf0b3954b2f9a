"""What a linear layer keeps, exactly, and the bounds of its peaks; a gate of attention to the byte."""

from dataclasses import replace

import pytest

from terrace.base.errors import ModelError, PlanError
from terrace.model.blocks import block_specs
from terrace.model.config import ModelConfig, parse_model
from terrace.plan.context_rules import why_no_scan, why_whole
from terrace.plan.context_traffic import ContextTraffic
from terrace.plan.in_block_messages import ContextMessage
from terrace.plan.mesh import Mesh
from terrace.program.block_program.attention import steps_of
from terrace.program.block_program.steps import messages_of
from terrace.program.lowering import build
from terrace.simulate.attention_cost import attention_cost
from terrace.simulate.footprint import work_of
from tests.simulate import test_activations
from tests.support.activations import MODELS
from tests.support.nightly import nightly
from tests.support.parity import exact
from tests.support.toys import cluster_of

_SIZES = {"vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "intermediate_size": 96, "head_dim": 24, "full_attention_interval": 1}
_GATED = parse_model(_SIZES | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4})
_LINEAR = replace(_GATED, is_linear=True)
OF_HEADS = {"small": (2, 8, 8), "long keys": (2, 64, 32), "long values": (4, 16, 64)}


def measured(name: str, model: ModelConfig, compute: str, monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    monkeypatch.setitem(MODELS, name, model)
    saved, forward, backward, predicted = test_activations.run_block(name, compute, 256, 1)
    assert sum(predicted.saved.values()) == saved
    return forward, predicted.forward_peak_bytes, backward, predicted.backward_peak_bytes


def test_a_gate_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, of_forward, backward, of_backward = measured("gated", _GATED, "fp32", monkeypatch)
    assert (of_forward, of_backward) == (forward, backward)


@pytest.mark.parametrize("compute", ["bf16", *nightly("fp32", "fp64")])
@pytest.mark.parametrize("name", OF_HEADS)
def test_a_linear_layer(name: str, compute: str, monkeypatch: pytest.MonkeyPatch) -> None:
    key_heads, key_dim, value_dim = OF_HEADS[name]
    sizes = replace(_LINEAR.delta, key_heads=key_heads, key_dim=key_dim, value_dim=value_dim)
    found = measured(name, replace(_LINEAR, delta=sizes), compute, monkeypatch)
    for peak, bound in (found[:2], found[2:]):
        assert peak <= bound <= 1.2 * peak


def test_a_ring_of_linear_layers_sends_as_much_for_any_length() -> None:
    """By hand: two tiers of 2 and 3 ring ranks, rows of 24 and 240 tokens, four heads of 8 x 8, three taps of halo."""
    config = replace(_LINEAR, delta=replace(_LINEAR.delta, key_dim=8, value_dim=8))
    mapping = {"package": {"context": {"ring": 2}}, "node": {"context": {"ring": 3}}}
    plan = replace(exact("ddp", cluster_of(2, 3), mapping=mapping), micro_batch=2, compute="bf16")
    for sequence in (24, 240):
        traffic = ContextTraffic(plan, Mesh.of(cluster_of(2, 3), plan), sequence, ("package", "node"))
        sent = traffic.attention(block_specs(config)[1])
        halo, maps = 2 * 2 * 3 * (2 * 2 * 8 + 4 * 8) * 2, 2 * 2 * 4 * 8 * (8 + 8) * 4
        for steps in steps_of(sent):
            found = [sent.sends(message)[0] for message in messages_of(steps) if isinstance(message, ContextMessage)]
            assert sorted(found) == sorted([(0, halo), (0, maps), (1, 2 * halo), (1, 2 * maps)])


def test_linear_layers_refuse_what_passes_no_state() -> None:
    blocks = block_specs(_LINEAR)
    assert "use a ring" in why_no_scan(blocks, 64, 1, 2)
    assert "use a multiple of 8" in why_no_scan(blocks, 60, 4, 1)
    assert "at least 3 tokens" in why_no_scan(blocks, 16, 4, 1)
    assert not why_no_scan(blocks, 64, 4, 1)
    assert "deals documents" in why_whole(blocks, balance="cost")


def test_a_row_that_a_ring_does_not_cut_evenly_is_refused_before_a_step_is_made() -> None:
    cluster = cluster_of(2, 2)
    plan = exact("zero3", cluster, mapping={tier: {"context": {"ring": 2}} for tier in ("package", "node")})
    table = _SIZES | {"model_type": "qwen3_5_text", "num_hidden_layers": 2, "full_attention_interval": 2}
    blocks = block_specs(parse_model(table | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}))
    with pytest.raises(PlanError, match=r"sequence = 60: .* use a multiple of 8"):
        build(cluster, plan, blocks, 1, 60)
    build(cluster, plan, blocks, 1, 64)


def test_formats_of_messages_change_nothing_of_a_linear_layer() -> None:
    cluster = cluster_of(2)
    plan = exact("zero3", cluster, mapping={"package": {"context": {"ring": 2}}})
    coded = replace(plan, wire={"context": {"package": "int8"}})
    (layer,) = block_specs(_LINEAR)[1:-1]
    plain, other = (work_of(cluster, each, layer.operations, 64, "cpu") for each in (plan, coded))
    assert plain == other


def test_sizes_that_no_layer_has() -> None:
    table = _SIZES | {"model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    with pytest.raises(ModelError, match="linear_conv_kernel_dim = 129 must be at most 128"):
        parse_model(table | {"linear_conv_kernel_dim": 129, "layer_types": ["linear_attention"]})


def test_linear_layers_alone_have_no_pairs_to_share_out() -> None:
    cluster, blocks = cluster_of(2), block_specs(_LINEAR)
    cost = attention_cost(cluster, blocks, rows=2, compute="fp32")
    peak = cluster.device.peak_flops_per_s["fp32"] * cluster.device.kernels.gemm
    assert cost.token_s == 3 * sum(block.forward_flops(1, 1) for block in blocks) / (2 * peak)
    assert (cost.whole_pair_s, cost.key_bytes) == (0.0, 0.0)
