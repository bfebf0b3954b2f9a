"""The price of products in 8-bit floats: their peak, and every byte that quantising them moves."""

from dataclasses import replace
from typing import Literal

import pytest

from terrace.base.errors import ClusterError, PlanError
from terrace.cluster.cluster import Kernels
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import head_operations, layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.model.experts.config import ExpertsConfig
from terrace.plan.kinds import Kinds
from terrace.plan.presets import preset
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build
from terrace.simulate.cost import step_costs
from terrace.simulate.footprint import footprint, work_of
from terrace.simulate.kernels import gemm_s, stream_s
from terrace.simulate.layers import block_seconds, matrices_of
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
    (m, k, n, number) = 512, 256, 1024, 3
    shape, flops_s = Matrices(m, k, n, number), 2 * m * k * n / IDEAL.peak_flops_per_s["fp8"]
    found = scaled_seconds(COMPUTE_ONLY, [shape, shape], "bf16", "fp8", accumulate=False)
    assert found == pytest.approx((2 * flops_s,) * 3)


def test_products_have_a_sustained_share_of_their_own() -> None:
    """Without one it is that of other products."""
    shape = [Matrices(512, 256, 1024, 1)]
    ideal, shared, own = (
        scaled_seconds(replace(COMPUTE_ONLY, kernels=kernels), shape, "bf16", "fp8", accumulate=True)
        for kernels in (Kernels(), Kernels(gemm=0.8), Kernels(gemm=0.8, gemm_fp8=0.5))
    )
    assert shared == pytest.approx([each / 0.8 for each in ideal])
    assert own == pytest.approx([each / 0.5 for each in ideal])
    assert gemm_s(replace(H100, kernels=Kernels(gemm_fp8=0.5)), 512, 256, 1024) == gemm_s(IDEAL, 512, 256, 1024)


# Azure AI-benchmarking-guide, cuBLASLt with random data: TFLOP/s on ND H100 v5 and H200 v5, and on ND GB200 v6.
MEASURED = {
    ("dgx-h100", (8192, 8192, 8192)): 1290,
    ("dgx-h100", (16384, 16384, 16384)): 1377,
    ("dgx-h100", (6144, 12288, 12288)): 1351,
    ("dgx-h200", (32768, 32768, 32768)): 1382,
    ("gb200-nvl72", (8192, 8192, 8192)): 2877,
    ("gb200-nvl72", (16384, 16384, 16384)): 2907,
}


@pytest.mark.parametrize(("name", "shape"), MEASURED, ids=str)
def test_presets_have_the_measured_rates(name: str, shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    device = replace(load_cluster(name).device, memory_bandwidth_bytes_per_s=1e30)
    seconds = scaled_seconds(device, [Matrices(m, k, n, 1)], "bf16", "fp8", accumulate=True)[2]
    assert 2 * m * k * n / seconds / 1e12 == pytest.approx(MEASURED[name, shape], rel=0.05)


M, K, N = 512, 256, 1024
TOKENS, WEIGHTS, RESULTS = M * K, K * N, M * N
# By hand: bytes to quantise in bf16, of a forward, of input and of weight gradients. 5 an element, and 2 where it is
# turned; of rows both orders are made of the values.
BYTES = {
    ("fp8", False, False): (7 * TOKENS + 5 * WEIGHTS, 7 * RESULTS + 7 * WEIGHTS, 0),
    ("fp8", False, True): (5 * TOKENS + 5 * WEIGHTS, 7 * RESULTS + 7 * WEIGHTS, 2 * TOKENS),
    ("fp8", True, False): (5 * TOKENS + 5 * WEIGHTS, 7 * RESULTS + 7 * WEIGHTS, 7 * TOKENS),
    ("fp8:row", False, False): (12 * TOKENS + 5 * WEIGHTS, 12 * RESULTS + 7 * WEIGHTS, 0),
    ("fp8:row+e4m3", True, True): (5 * TOKENS + 5 * WEIGHTS, 12 * RESULTS + 7 * WEIGHTS, 7 * TOKENS),
}


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize(("form", "returns", "recomputed"), BYTES, ids=str)
def test_bytes_by_hand(form: str, returns: bool, recomputed: bool, accumulate: bool) -> None:
    """Beside them a product of codes into 2 bytes. The input of three matrices is quantised once."""
    written = 0 if accumulate else 4 * WEIGHTS
    products = (
        TOKENS + WEIGHTS + 2 * RESULTS,
        RESULTS + WEIGHTS + 2 * TOKENS,
        TOKENS + RESULTS + 2 * WEIGHTS + written,
    )
    shape = Matrices(M, K, N, 3, returns=returns)
    found = scaled_seconds(MEMORY_ONLY, [shape], "bf16", form, accumulate=accumulate, recomputed=recomputed)
    wanted = [
        (quantised + product) / IDEAL.memory_bandwidth_bytes_per_s
        for quantised, product in zip(BYTES[form, returns, recomputed], products, strict=True)
    ]
    assert found == pytest.approx(wanted)
    # What was quantised for the matrices before it is not quantised for the next.
    entered = scaled_seconds(
        MEMORY_ONLY, [shape._replace(is_entered=True)], "bf16", form, accumulate=accumulate, recomputed=recomputed
    )
    each = 12 if ":row" in form or returns else 7
    assert sum(found) - sum(entered) == pytest.approx(each * TOKENS / IDEAL.memory_bandwidth_bytes_per_s)


@pytest.mark.parametrize("backend", ["cuda", "cpu"])
def test_weights_that_are_codes_are_not_quantised(backend: Literal["cuda", "cpu"]) -> None:
    """By hand, an element: 5 bytes less on a GPU, 17 on a CPU, both ways. Weight gradients stay."""
    device = replace(MEMORY_ONLY, backend=backend, peak_flops_per_s={"fp8": 1e30, "fp32": 1e30})
    shape = [Matrices(M, K, N, 3)]
    found, coded = (scaled_seconds(device, shape, "bf16", "fp8", codes, accumulate=True) for codes in (False, True))
    saved_s = (5 if backend == "cuda" else 17) * WEIGHTS / IDEAL.memory_bandwidth_bytes_per_s
    assert [plain - less for plain, less in zip(found, coded, strict=True)] == pytest.approx([saved_s, saved_s, 0.0])
    assert launches(shape, 8, "fp8", coded=True) == 1 + 3 / 8


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
                work=work_of(cluster, each, layer_operations(MODEL), 4096),
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
        step_costs(program, work_of(cluster, plan, layer_operations(MODEL), 4096))


@pytest.mark.parametrize("accumulate", [False, True])
def test_experts_are_priced_each_by_itself(accumulate: bool) -> None:
    """The products of every expert over its rows, and a copy of their results; passes over rows are as in bf16."""
    experts = ExpertsConfig(num_experts=8, per_token=2, intermediate_size=512)
    plain, scaled = (
        Work(layer=layer_operations(replace(MODEL, experts=experts)), sequence=1024, products=products)
        for products in (None, "fp8")
    )
    rows, hidden, inner = 1024 * 2 // 8, 4096, 512
    enters = Matrices(rows, hidden, inner, 1)
    of_one = [enters, enters._replace(is_entered=True), Matrices(rows, inner, hidden, 1)]
    shapes = [(rows, hidden, inner), (rows, hidden, inner), (rows, inner, hidden)]
    device = replace(H100, kernels=replace(H100.kernels, launch_s=0.0))
    before, after = (passed_seconds(device, each, each.layer.mixture, 1024, accumulate) for each in (plain, scaled))
    products = scaled_seconds(device, of_one, "bf16", "fp8", accumulate=accumulate)
    turns = [(0, 1, 2), (0, 2, 1), (1, 0, 2)]  # of a forward, input and weight gradients
    for part, turn in enumerate(turns):
        first, second, third = turn
        gemms_s = sum(gemm_s(device, each[first], each[second], each[third], 1, "bf16") for each in shapes)
        width = (2 * inner + hidden, 2 * hidden + inner, 0)[part]
        copied_s = stream_s(device, 2 * 2 * rows * width)
        assert after[part] - before[part] == pytest.approx(8 * (products[part] + copied_s - gemms_s))


def test_kernels_are_launched_for_every_operand() -> None:
    """2 to quantise, 1 to turn: of the input, of three matrices and of the gradients of their results."""
    device = replace(IDEAL, kernels=Kernels(launch_s=1.0), peak_flops_per_s={"fp8": 1e30})
    device, shape = replace(device, memory_bandwidth_bytes_per_s=1e30), Matrices(16, 16, 16, 3)
    found = scaled_seconds(device, [shape], "bf16", "fp8", accumulate=True)
    assert found == pytest.approx((1 + 2 + 1 + 3 * 2, 1 + 3 * 3 + 3 * 3, 1))
    by_row = scaled_seconds(device, [shape], "bf16", "fp8:row", accumulate=True)
    assert by_row == pytest.approx((1 + 2 + 3 + 3 * 2, 1 + 3 * 5 + 3 * 3, 1))
    one = Matrices(1, 1, 1, 1, returns=True)
    assert launches([Matrices(1, 1, 1, 3), one], 8, "fp8") == 1 + (3 + 6 + 2 + 2) / 8
    assert launches([Matrices(1, 1, 1, 3), one._replace(is_entered=True)], 8, "fp8:row") == 1 + (5 + 6 + 2) / 8


def test_large_layers_gain_and_small_ones_lose() -> None:
    wide, narrow = Work(layer=layer_operations(MODEL), sequence=8192), Work(layer=layer_operations(MODEL), sequence=64)
    for work, faster in ((wide, True), (narrow, False)):
        plain, scaled = (block_seconds(H100, replace(work, products=products)) for products in (None, "fp8:row"))
        assert (scaled.forward_s + scaled.backward_s < plain.forward_s + plain.backward_s) == faster
    recomputed = block_seconds(H100, replace(wide, products="fp8", recompute="full"))
    assert recomputed.recompute_s == recomputed.forward_s
    # The head keeps its dtype.
    head = replace(wide, layer=head_operations(MODEL))
    assert block_seconds(H100, replace(head, products="fp8")) == block_seconds(H100, head)


@pytest.mark.parametrize(("operation", "width"), {"mlp": 14336, "attention": 4096, "norms": 2 * 4096}.items(), ids=str)
def test_inputs_that_come_again_are_quantised_again(operation: str, width: int) -> None:
    """In the backward, from values: 5 bytes an element and 2 to turn, and no codes in the forward."""
    work = Work(layer=layer_operations(MODEL), sequence=8192, products="fp8")
    device = replace(H100, kernels=replace(H100.kernels, launch_s=0.0))
    kept, recomputed = (
        block_seconds(device, replace(work, operations=operations)) for operations in ((), (operation,))
    )
    numel_s = 8192 * width / (device.memory_bandwidth_bytes_per_s * device.kernels.memory)
    assert kept.forward_s - recomputed.forward_s == pytest.approx(2 * numel_s)
    assert recomputed.weight_s - kept.weight_s == pytest.approx(7 * numel_s)


def test_sequence_parallel_ranks_gather_inputs_again() -> None:
    """Those of query, key and value, and of gate and up; a layer that is recomputed gathers them once."""
    work = Work(layer=layer_operations(MODEL), sequence=8192, tensor=2, products="fp8")
    whole = [False] * 4
    for each, wanted in (
        (work, [True, False, True, False]),
        (replace(work, sequence_parallel=False), whole),
        (replace(work, tensor=1), whole),
        (replace(work, recompute="full"), whole),
    ):
        assert [matrices.returns for matrices in matrices_of(each)] == wanted


def test_a_cpu_multiplies_in_fp32() -> None:
    cpu = replace(COMPUTE_ONLY, backend="cpu", peak_flops_per_s={"fp32": 1e12})
    found = scaled_seconds(cpu, [Matrices(64, 64, 64, 1)], "bf16", "fp8", accumulate=True)
    assert found == pytest.approx((2 * 64**3 / 1e12,) * 3)


def test_a_device_without_the_peak() -> None:
    with pytest.raises(ClusterError, match=r"has no peak_flops_per_s\.fp8"):
        scaled_seconds(load_cluster("dgx-a100").device, [Matrices(64, 64, 64, 1)], "bf16", "fp8", accumulate=True)


def test_a_plan_and_its_work_say_the_same() -> None:
    cluster, blocks = load_cluster("dgx-h100"), block_specs(MODEL)
    plan = replace(preset("zero3", cluster), compute="bf16", products="fp8")
    program, work = (
        build(cluster, plan, blocks, 2, 512),
        work_of(cluster, plan, layer_operations(MODEL), 512),
    )
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


def test_a_step_as_the_documents_quote_it() -> None:
    """docs/plans.md: time with products in 8 bits, and with matrices held as codes, over that in bf16."""
    cluster = load_cluster("dgx-h100").resized(8)
    model = parse_model({"model_type": "llama", "vocab_size": 128256, "num_hidden_layers": 32, **SHAPE})
    plan = replace(preset("zero1", cluster), compute="bf16", mapping={"node": {"context": 2, "data": 4}})
    steps, blocks = [], block_specs(model)
    for products, wire in ((None, {}), ("fp8", {}), ("fp8", {"refresh": {"node": "fp8"}})):
        each = replace(plan, products=products, wire=wire)
        step = Step(
            cluster=cluster,
            plan=each,
            blocks=blocks,
            num_micros=32,
            sequence=8192,
            work=work_of(cluster, each, layer_operations(model), 8192),
        )
        steps.append(predict_step(step).step_s)
        held = footprint(cluster, each, Kinds.of(blocks), 8192, 32)["params"]
    assert [each / steps[0] for each in steps[1:]] == pytest.approx([0.86, 0.78], abs=0.02)
    assert held == pytest.approx(16.06e9 - 7e9, rel=0.01)
