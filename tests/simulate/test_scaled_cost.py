"""The price of products in 8-bit floats: their peak, and every byte that quantising them moves."""

from dataclasses import replace
from typing import Literal

import pytest

from terrace.base.errors import ClusterError, PlanError
from terrace.cluster.cluster import Kernels
from terrace.cluster.presets import load_cluster
from terrace.model.config import block_specs, parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.model.spec import Computes
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.kernels import gemm_s, stream_s
from terrace.simulate.layers import block_seconds
from terrace.simulate.mixture import passed_seconds
from terrace.simulate.scaled import Matrices, launches, scaled_seconds
from terrace.simulate.step import Step, predict_step
from terrace.simulate.work import Work

H100 = load_cluster("dgx-h100").device
IDEAL = replace(H100, kernels=Kernels())
COMPUTE_ONLY = replace(IDEAL, memory_bandwidth_bytes_per_s=1e30)
MEMORY_ONLY = replace(IDEAL, peak_flops_per_s={"fp8": 1e30})
SHAPE = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
MODEL = parse_model({"model_type": "llama", "vocab_size": 32000, "num_hidden_layers": 2, **SHAPE})


def test_products_have_the_fp8_peak() -> None:
    (m, k, n, number) = shape = Matrices(512, 256, 1024, 3)
    flops_s = 2 * m * k * n / IDEAL.peak_flops_per_s["fp8"]
    assert scaled_seconds(COMPUTE_ONLY, [shape, shape], "bf16", accumulate=False) == pytest.approx((2 * flops_s,) * 3)
    assert number == 3


@pytest.mark.parametrize("accumulate", [False, True])
def test_bytes_by_hand(accumulate: bool) -> None:
    """bf16: 5 bytes an element quantised, 2 more where it is transposed, and a product of codes into 2 bytes."""
    m, k, n = 512, 256, 1024
    tokens, weights, results = 3 * m * k, k * n, m * n
    written = 0 if accumulate else 4 * weights
    wanted = (
        5 * (tokens + weights) + m * k + k * n + 2 * m * n,
        5 * (results + weights) + 2 * weights + m * n + k * n + 2 * m * k,
        7 * (results + tokens) + m * k + m * n + 2 * k * n + written,
    )
    found = scaled_seconds(MEMORY_ONLY, [Matrices(m, k, n, 3)], "bf16", accumulate=accumulate)
    assert found == pytest.approx([each / IDEAL.memory_bandwidth_bytes_per_s for each in wanted])


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_weights_that_are_codes_are_not_quantised(backend: Literal["cuda", "cpu"]) -> None:
    """By hand, an element: 5 bytes less on a GPU, on a CPU all but the 5 of codes in fp32. Weight gradients stay."""
    m, k, n = 512, 256, 1024
    device = replace(MEMORY_ONLY, backend=backend, peak_flops_per_s={"fp8": 1e30, "fp32": 1e30})
    found, coded = (
        scaled_seconds(device, [Matrices(m, k, n, 3)], "bf16", codes, accumulate=True) for codes in (False, True)
    )
    saved_s = (5 if backend == "cuda" else 17) * k * n / IDEAL.memory_bandwidth_bytes_per_s
    assert [plain - less for plain, less in zip(found, coded, strict=True)] == pytest.approx([saved_s, saved_s, 0.0])
    assert launches([Matrices(1, 1, 1, 3)], 8, coded=True) == 1 + 2 * 3 / 8


def test_steps_that_share_scales() -> None:
    """Predicted with fewer bytes, less memory and less time; a plan's work says what its weights are."""
    cluster = load_cluster("dgx-h100")
    plan = replace(preset("zero3", cluster), products="fp8", compute="bf16", micro_batch=1, wire={})
    outer = cluster.tiers[-1].name
    coded = replace(plan, wire={"gather": {outer: "fp8"}})
    specs = block_specs(MODEL)
    steps = [
        predict_step(
            Step(
                cluster=cluster,
                plan=each,
                blocks=specs,
                num_micros=1,
                sequence=4096,
                work=work_of(cluster, each, MODEL, 4096),
            )
        )
        for each in (plan, coded)
    ]
    before, after = (step.reports[0] for step in steps)
    assert after.step_s < before.step_s
    assert 0.5 < after.sent_bytes[MessageClass.GATHER, outer] / before.sent_bytes[MessageClass.GATHER, outer] < 0.9
    sizes = [footprint(cluster, each, Kinds.of(specs), 4096, 1) for each in (plan, coded)]
    for category in ("params", "gathered"):
        assert sizes[1][category] < sizes[0][category], category
    program = build(cluster, coded, specs, 1, 4096)
    with pytest.raises(PlanError, match="the work has products = 'fp8', the plan 'fp8', with weights held as codes"):
        step_costs(program, work_of(cluster, plan, MODEL, 4096))


@pytest.mark.parametrize("accumulate", [False, True])
def test_experts_are_priced_each_by_itself(accumulate: bool) -> None:
    """The products of every expert over its rows, and a copy of their results; passes over rows are as in bf16."""
    experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=512)
    plain, scaled = (
        Work(model=replace(MODEL, experts=experts), sequence=1024, products=products) for products in (None, "fp8")
    )
    rows, hidden, inner = 1024 * 2 // 8, 4096, 512
    of_one = [Matrices(rows, hidden, inner, 1), Matrices(rows, hidden, inner, 1), Matrices(rows, inner, hidden, 1)]
    shapes = [(rows, hidden, inner), (rows, hidden, inner), (rows, inner, hidden)]
    device = replace(H100, kernels=replace(H100.kernels, launch_s=0.0))
    before, after = (passed_seconds(device, each, experts, 1024, accumulate) for each in (plain, scaled))
    products = scaled_seconds(device, of_one, "bf16", accumulate=accumulate)
    turns = [(0, 1, 2), (0, 2, 1), (1, 0, 2)]  # of a forward, input and weight gradients
    for part, turn in enumerate(turns):
        first, second, third = turn
        gemms_s = sum(gemm_s(device, each[first], each[second], each[third], 1, "bf16") for each in shapes)
        width = (2 * inner + hidden, 2 * hidden + inner, 0)[part]
        copied_s = stream_s(device, 2 * 2 * rows * width)
        assert after[part] - before[part] == pytest.approx(8 * (products[part] + copied_s - gemms_s))


def test_kernels_are_launched_for_every_operand() -> None:
    device = replace(IDEAL, kernels=Kernels(launch_s=1.0), peak_flops_per_s={"fp8": 1e30})
    found = scaled_seconds(
        replace(device, memory_bandwidth_bytes_per_s=1e30), [Matrices(16, 16, 16, 3)], "bf16", accumulate=True
    )
    assert found == pytest.approx((1 + 3 * 4, 1 + 3 * 5, 1 + 3 * 6))
    assert launches([Matrices(1, 1, 1, 3), Matrices(1, 1, 1, 1)], 8) == 1 + 4 * 4 / 8


def test_large_layers_gain_and_small_ones_lose() -> None:
    wide, narrow = Work(model=MODEL, sequence=8192), Work(model=MODEL, sequence=64)
    for work, faster in ((wide, True), (narrow, False)):
        plain, scaled = (
            block_seconds(H100, replace(work, products=products), Computes.RESIDUAL) for products in (None, "fp8:row")
        )
        assert (scaled.forward_s + scaled.backward_s < plain.forward_s + plain.backward_s) == faster
    again = block_seconds(H100, replace(wide, products="fp8", recompute="full"), Computes.RESIDUAL)
    assert again.again_s == again.forward_s
    # The head keeps its dtype.
    assert block_seconds(H100, replace(wide, products="fp8"), Computes.LOGITS) == block_seconds(
        H100, wide, Computes.LOGITS
    )


def test_a_cpu_multiplies_in_fp32() -> None:
    cpu = replace(COMPUTE_ONLY, backend="cpu", peak_flops_per_s={"fp32": 1e12})
    found = scaled_seconds(cpu, [Matrices(64, 64, 64, 1)], "bf16", accumulate=True)
    assert found == pytest.approx((2 * 64**3 / 1e12,) * 3)


def test_a_device_without_the_peak() -> None:
    with pytest.raises(ClusterError, match=r"has no peak_flops_per_s\.fp8"):
        scaled_seconds(load_cluster("dgx-a100").device, [Matrices(64, 64, 64, 1)], "bf16", accumulate=True)


def test_a_plan_and_its_work_say_the_same() -> None:
    cluster, blocks = load_cluster("dgx-h100"), block_specs(MODEL)
    plan = replace(preset("zero3", cluster), compute="bf16", products="fp8")
    program, work = build(cluster, plan, blocks, 2, 512), work_of(cluster, plan, MODEL, 512)
    assert work.products == "fp8"
    scaled = step_costs(program, work)
    assert (
        scaled.forward_s[1]
        != step_costs(
            build(cluster, replace(plan, products=None), blocks, 2, 512), replace(work, products=None)
        ).forward_s[1]
    )
    with pytest.raises(PlanError, match="the work has products = None, the plan 'fp8'"):
        step_costs(program, replace(work, products=None))
