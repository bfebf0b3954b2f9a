"""The price of mixtures of experts: closed answers on an ideal device, and layers of two kinds in one model."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from terrace.cluster.cluster import Kernels
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, forward_flops
from terrace.model.experts.config import ExpertsConfig
from terrace.plan.expert_traffic import ExpertTraffic
from terrace.simulate.activations import activations_of
from terrace.simulate.experts import priced_experts
from terrace.simulate.layers import block_seconds, seconds_of
from terrace.simulate.mixture import even_loads
from terrace.simulate.work import Work
from tests.support.mixtures import EXPERTS, GROUPED, PLAIN, SHARED, mixture

A100 = load_cluster("dgx-a100").device
IDEAL = replace(A100, kernels=Kernels())
SAME_PEAKS = {"bf16": 312e12, "fp32": 312e12}
COMPUTE_ONLY = replace(IDEAL, memory_bandwidth_bytes_per_s=1e30, peak_flops_per_s=SAME_PEAKS)
MEMORY_ONLY = replace(IDEAL, memory_bandwidth_bytes_per_s=1.0, peak_flops_per_s=dict.fromkeys(SAME_PEAKS, 1e30))


@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("sequence", [1, 2, 100])
def test_with_free_memory_a_pass_is_the_flops_of_active_experts(name: str, sequence: int) -> None:
    """Whether there are more rows than experts or fewer, and whether they divide evenly or not."""
    model = mixture(EXPERTS[name])
    flops = forward_flops(model, 1, 1, sequence)
    core = 4 * sequence**2 * model.num_heads * model.head_dim
    seconds = seconds_of(
        COMPUTE_ONLY, Work(layer=layer_operations(model), sequence=sequence, causal=False), block_specs(model)[1]
    )
    assert seconds.forward_s * 312e12 == pytest.approx(flops, abs=1e-3)
    assert seconds.weight_s * 312e12 == pytest.approx(flops - core, abs=1e-3)
    assert seconds.input_s * 312e12 == pytest.approx(flops - core + 2.5 * core, abs=1e-3)


def test_an_even_load_has_every_row_once() -> None:
    for tokens in (0, 1, 3, 8, 100):
        for experts in EXPERTS.values():
            loads = even_loads(tokens, experts)
            assert sum(count * rows for count, rows in loads) == tokens * experts.per_token
            assert sum(count for count, _ in loads) == min(experts.num_experts, tokens * experts.per_token)
            assert all(rows > 0 for _, rows in loads)


def products_bytes(dtype_bytes: int, *shapes: tuple[int, int, int]) -> int:
    return dtype_bytes * sum(m * k + k * n + m * n for m, k, n in shapes)


def test_passes_over_memory_are_the_known_bytes() -> None:
    """The cost that a mixture adds to a layer without any MLP, in bytes on a device of one byte a second."""
    hidden, inner, experts, tokens = 64, 40, 8, 96
    rows = 2 * tokens
    of_expert = [(rows // experts, hidden, inner)] * 2 + [(rows // experts, inner, hidden)]
    products = experts * products_bytes(2, *of_expert) + products_bytes(4, (tokens, hidden, experts))
    wanted_forward = products + 6 * hidden * tokens + 20 * experts * tokens + 64 * rows
    wanted_forward += 2 * (5 * hidden * rows + hidden * tokens + 5 * inner * rows)
    wanted_input = products + 6 * hidden * tokens + 16 * experts * tokens
    wanted_input += 2 * (5 * hidden * rows + 4 * hidden * tokens + 11 * inner * rows)
    added = _added(PLAIN, tokens)
    assert added == pytest.approx((wanted_forward, wanted_input, products))


def _added(experts: ExpertsConfig, tokens: int, **more: Any) -> tuple[float, float, float]:
    # A dense layer has the same attention, norms and sums, and its MLP's two products and activation.
    dense = replace(mixture(experts), experts=None)
    work = Work(layer=layer_operations(mixture(experts)), sequence=tokens)
    found = block_seconds(MEMORY_ONLY, work, **more)
    whole = block_seconds(MEMORY_ONLY, replace(work, layer=layer_operations(dense)), **more)
    mlp = products_bytes(2, (tokens, 64, 2 * 96), (tokens, 96, 64))
    accumulated = 6 * 3 * 64 * 96 if more else 0
    return (
        found.forward_s - whole.forward_s + mlp + 6 * 96 * tokens,
        found.input_s - whole.input_s + mlp + 10 * 96 * tokens,
        found.weight_s - whole.weight_s + mlp + accumulated,
    )


def test_gradients_of_all_experts_with_rows_accumulate() -> None:
    """6 bytes an element, of an expert without a row none."""
    for tokens, touched in ((96, 8), (2, 4)):
        once, more = _added(PLAIN, tokens)[2], _added(PLAIN, tokens, accumulate=True)[2]
        assert more - once == pytest.approx(6 * (touched * 3 * 64 * 40 + 8 * 64))


def test_a_shared_expert_is_an_mlp_of_its_own() -> None:
    alone = replace(SHARED, shared_size=0, shared_gate=False)
    ungated = replace(SHARED, shared_gate=False)
    tokens = 64
    mlp = products_bytes(2, (tokens, 64, 2 * 28), (tokens, 28, 64))
    added = [_added(each, tokens)[0] for each in (alone, ungated, SHARED)]
    assert added[1] - added[0] == pytest.approx(mlp + 6 * 28 * tokens + 6 * 64 * tokens)
    gate = products_bytes(2, (tokens, 64, 1))
    assert added[2] - added[1] == pytest.approx(gate + 4 * 64 * tokens)


def test_a_host_launches_the_products_of_every_expert() -> None:
    slow = replace(A100, kernels=replace(A100.kernels, host_layer_s=1.0))
    few, many = (
        block_seconds(
            slow,
            Work(layer=layer_operations(mixture(replace(PLAIN, num_experts=count))), sequence=512),
        )
        for count in (8, 128)
    )
    assert few.forward_s == pytest.approx(1 + (20 + 3 * 8) / 38)
    assert many.forward_s - few.forward_s == pytest.approx(3 * 120 / 38)
    assert few.input_s + few.weight_s == pytest.approx(few.forward_s)


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_host_launches_the_products_of_the_experts_that_its_rank_holds(pieces: int) -> None:
    """16 ranks share 128 experts: 8 products of each kind for each piece of the tokens, not 128."""
    slow = replace(A100, kernels=replace(A100.kernels, host_layer_s=1.0))
    model = mixture(replace(PLAIN, num_experts=128))
    work = Work(layer=layer_operations(model), sequence=512)
    numbers = {"num_units": 16, "num_rows": 1, "pieces": pieces, "shares": False, "chunks": (pieces, pieces)}
    _, divided = priced_experts(slow, work, cast(ExpertTraffic, SimpleNamespace(**numbers)), False)
    found = seconds_of(slow, work, block_specs(model)[1], divided=divided)
    wanted_s = 1 + (20 + 14 * (pieces - 1) + 3 * 8 * pieces) / 38
    assert found.forward_s == pytest.approx(wanted_s)
    assert found.input_s + found.weight_s == pytest.approx(wanted_s)


@pytest.mark.parametrize("experts", [PLAIN, GROUPED])
def test_a_dense_layer_among_mixtures_is_that_of_a_dense_model(experts: ExpertsConfig) -> None:
    """Seconds and bytes; embedding and head too."""
    model = mixture(experts, dense_layers=(0, 2))
    dense = replace(model, experts=None)
    work, alone = (Work(layer=layer_operations(each), sequence=256, micro_batch=2) for each in (model, dense))
    for index, (block, other) in enumerate(zip(block_specs(model), block_specs(dense), strict=True)):
        alike = index not in (2, 4)
        assert (seconds_of(A100, work, block) == seconds_of(A100, alone, other)) == alike
        kept = [activations_of(*each, "cpu").saved for each in ((work, block), (alone, other))]
        assert (kept[0] == kept[1]) == alike
    # What a layer costs among others is what it costs where all are alike.
    whole = mixture(experts)
    first = block_specs(whole)[1]
    assert seconds_of(A100, work, block_specs(model)[2]) == seconds_of(
        A100, replace(work, layer=layer_operations(whole)), first
    )
