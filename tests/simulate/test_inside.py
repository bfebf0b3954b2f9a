"""Programs with a tensor axis: messages inside a block by hand, how they are hidden, activations of their plans."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.model.config import parse_model
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass
from terrace.planner.advice import changes
from terrace.program.block_program.steps import Compute, ComputeKind, messages_of, moments_of
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build
from terrace.program.program import Program
from terrace.report.inside import inside_table
from terrace.simulate.activations import activations_of
from terrace.simulate.cost import Costs, step_costs
from terrace.simulate.critical import critical_path
from terrace.simulate.curve import memory_curve
from terrace.simulate.events import simulate
from terrace.simulate.footprint import work_of
from terrace.simulate.inside import PricedMoment, block_prices, exposed, inside_seconds, rooms_of
from terrace.simulate.layers import block_seconds
from terrace.simulate.recording import record
from terrace.simulate.step import Step
from terrace.simulate.work import Work
from tests.support.activations import layer_activations
from tests.support.byte_formula import step_bytes
from tests.support.planner_cases import gpt
from tests.support.totals import verify

MODEL = gpt(2, 64, 4, vocab=96, positions=32)
LLAMA = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    }
)
SEQUENCE = 32
LATENCY_S, RATE = 1e-3, 1e6


def cluster_of(*sizes: int, penalty: float = 0.0) -> Cluster:
    """Tiers of one latency; the rate falls tenfold from one to the next."""
    device = replace(load_cluster("local").device, overlap_penalty=penalty)
    device = replace(device, kernels=replace(device.kernels, launch_s=0.0))
    tiers = tuple(
        Tier(name=f"t{i}", size=size, bandwidth_bytes_per_s=RATE / 10**i, latency_s=LATENCY_S)
        for i, size in enumerate(sizes)
    )
    return Cluster(name="test", device=device, tiers=tiers)


def program_of(cluster: Cluster, tensor: Any, num_micros: int = 2, **more: Any) -> Program:
    values: dict[str, Any] = {"params": "t0", "grads": "t0", "optimizer": cluster.tiers[-1].name} | more
    plan = Plan(mapping={"t0": {"tensor": tensor, "data": 1}}, **values)
    program = build(cluster, plan, block_specs(MODEL), num_micros, SEQUENCE)
    verify(program)
    return program


def behind(program: Program, op: Op) -> dict[ComputeKind | None, float]:
    """Seconds of the messages of a layer's pass, by the computing that hides them."""
    moments = block_prices(program, 1).priced(moments_of(program.model.block_program(1).steps(op)))
    return {
        None if each.behind is None else each.behind.kind: sum(seconds for seconds, _ in each.parts) for each in moments
    }


ALONE, OUTPUTS, INPUTS, WEIGHTS = None, ComputeKind.OUTPUTS, ComputeKind.INPUT_GRADIENTS, ComputeKind.WEIGHT_GRADIENTS


def test_messages_of_a_layer_by_hand() -> None:
    """Two rows, fp32: T H elements in halves, 8 messages forward and back, two more to gather the inputs again."""
    program = program_of(cluster_of(2, 2), 2)
    one_s = LATENCY_S + SEQUENCE * 64 * 4 / 2 / RATE
    assert behind(program, Op.FORWARD) == pytest.approx({ALONE: 4 * one_s})
    # Waited for are the gathers of two outputs' gradients; two sums run beside the gradients of weights.
    backward = {ALONE: 2 * one_s, INPUTS: 2 * one_s, WEIGHTS: 2 * one_s}
    assert behind(program, Op.BACKWARD) == behind(program, Op.BACKWARD_INPUT) == pytest.approx(backward)
    assert behind(program, Op.BACKWARD_WEIGHT) == {}
    again = program_of(cluster_of(2, 2), 2, recompute=("layers.*",))
    assert behind(again, Op.BACKWARD) == pytest.approx({ALONE: 6 * one_s, WEIGHTS: 2 * one_s})
    whole = program_of(cluster_of(2, 2), 2, sequence_parallel=False)
    assert behind(whole, Op.FORWARD) == pytest.approx({ALONE: 4 * one_s})
    assert behind(whole, Op.BACKWARD) == pytest.approx({WEIGHTS: 4 * one_s})


def told(program: Program) -> list[list[str]]:
    """The cells of the rows of the table that people read."""
    console = Console(width=200)
    with console.capture() as capture:
        console.print(inside_table(program))
    kinds = [each.value for each in ComputeKind]
    ends = {"waited for", *kinds, *(f"fused with {each}" for each in kinds)}
    lines = [re.split(r" {2,}", line.strip()) for line in capture.get().splitlines()]
    return [cells for cells in lines if cells[-1] in ends]


def test_people_read_the_messages_of_each_kind_of_block() -> None:
    """The same two rows: a message of 8,192 bytes halves to 4.1 kB sent, 5.1 ms; the two layers are alike."""
    rows = told(program_of(cluster_of(2, 2), 2))
    one = ["rows", "4.1 kB on t0", "5.1 ms"]
    first = next(index for index, cells in enumerate(rows) if cells[0].startswith("layers.0"))
    assert rows[first : first + 5] == [
        ["layers.0 (x 2)", "forward", "2 gather", *one, "waited for"],
        ["2 reduce", *one, "waited for"],
        ["layers.0 (x 2)", "backward", "2 gather", *one, "waited for"],
        ["2 gather", *one, "gradients of inputs"],
        ["2 reduce", *one, "gradients of weights"],
    ]
    assert ["1 numbers", "columns and rows", "384 B on t0", "1.4 ms", "waited for"] in rows
    again = told(program_of(cluster_of(2, 2), 2, recompute=("layers.*",)))
    assert ["layers.0 (x 2)", "backward", "4 gather", *one, "waited for"] in again


def test_messages_in_parts_by_hand() -> None:
    """In four parts, a region waits for the first part of its gather and the last of its sum; three are hidden."""
    program = program_of(cluster_of(2, 2), 2, tensor_chunks=4)
    one_s, part_s = (LATENCY_S + SEQUENCE * 64 * 4 / 2 / parts / RATE for parts in (1, 4))
    assert behind(program, Op.FORWARD) == pytest.approx({ALONE: 4 * part_s, OUTPUTS: 12 * part_s})
    backward = {ALONE: 2 * part_s, INPUTS: 6 * part_s + 2 * one_s, WEIGHTS: 2 * one_s}
    assert behind(program, Op.BACKWARD) == pytest.approx(backward)


def on_cuda(*sizes: int) -> Cluster:
    cluster = cluster_of(*sizes)
    return replace(cluster, device=replace(cluster.device, backend="cuda"))


@pytest.mark.parametrize("rows", [2, 4])
def test_messages_fused_with_products_by_hand(rows: int) -> None:
    """Each hides behind its product as a whole, and leaves a tail of one rank's part: M / n. Bytes are those of whole
    messages."""
    cluster = on_cuda(rows, 2)
    program = program_of(cluster, rows, tensor_chunks="fused")
    one_s = (rows - 1) * (LATENCY_S + SEQUENCE * 64 * 4 / rows / RATE)
    assert behind(program, Op.FORWARD) == pytest.approx({OUTPUTS: 4 * one_s, ALONE: 4 * one_s / rows})
    # Gathered again are the inputs; the sums of their gradients stay behind the gradients of weights.
    backward = {INPUTS: 4 * one_s, ALONE: 2 * one_s / rows, WEIGHTS: 2 * one_s}
    assert behind(program, Op.BACKWARD) == pytest.approx(backward)
    whole = program_of(cluster, rows)
    assert program.sent_bytes == whole.sent_bytes
    assert [*messages_of(program.model.block_program(1).steps(Op.BACKWARD))] == [
        *messages_of(whole.model.block_program(1).steps(Op.BACKWARD))
    ]
    fused = ["2 gather", "rows", "4.1 kB on t0", "5.1 ms", "fused with gradients of inputs"]
    assert rows == 4 or fused in told(program)


def test_a_fused_product_takes_the_longer_and_a_tail() -> None:
    """max(product, message) + message / n, FLUX's model; products of 3 ms, and a hundred times as long."""
    program = program_of(on_cuda(2, 2), 2, tensor_chunks="fused")
    one_s = LATENCY_S + SEQUENCE * 64 * 4 / 2 / RATE
    forward = block_prices(program, 1).priced(moments_of(program.model.block_program(1).steps(Op.FORWARD)))
    for product_s in (0.003, 0.3):
        found = product_s + exposed(forward, rooms_of(product_s, 0.0, 0.0))[MessageClass.TENSOR]
        assert found == pytest.approx(max(product_s, 4 * one_s) + 4 * one_s / 2)
    chunked = program_of(on_cuda(2, 2), 2, tensor_chunks=2)
    parts = block_prices(chunked, 1).priced(moments_of(chunked.model.block_program(1).steps(Op.FORWARD)))
    # In two parts as much is alone, and a part more latency is paid.
    added = exposed(parts, rooms_of(0.3, 0.0, 0.0))[MessageClass.TENSOR]
    assert added - exposed(forward, rooms_of(0.3, 0.0, 0.0))[MessageClass.TENSOR] == pytest.approx(4 * LATENCY_S / 2)


def test_what_hides_a_message_ends_and_is_slowed() -> None:
    def added_s(penalty: float, input_s: float, weight_s: float) -> float:
        parts = {ALONE: 1.0, INPUTS: 2.0, WEIGHTS: 4.0}
        moments = [
            PricedMoment(MessageClass.TENSOR, None if kind is None else Compute(kind), ((seconds, penalty),), 1)
            for kind, seconds in parts.items()
        ]
        return exposed(moments, rooms_of(9.0, input_s, weight_s))[MessageClass.TENSOR]

    assert added_s(0.0, 10.0, 3.0) == 1.0 + 0.0 + 1.0
    assert added_s(0.0, 0.5, 10.0) == 1.0 + 1.5 + 0.0
    assert added_s(0.25, 10.0, 10.0) == 1.0 + 0.5 + 1.0
    ring = PricedMoment(MessageClass.CONTEXT, Compute(ComputeKind.ROUND, 1), ((3.0, 0.5), (2.0, 0.0)), 4)
    rooms = {Compute(ComputeKind.ROUND, 1): 4.0}
    assert exposed([ring], rooms) == {MessageClass.CONTEXT: 4 * (1.5 + 1.0)}  # the first message takes its room first


@pytest.mark.parametrize("tensor", [2, {"columns": 2}, {"rows": 2, "columns": 2}])
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_a_step_waits_for_the_sum_of_its_passes(tensor: Any, sequence_parallel: bool) -> None:
    cluster = cluster_of(4 if tensor == {"rows": 2, "columns": 2} else 2, 2)
    program = program_of(cluster, tensor, sequence_parallel=sequence_parallel)
    costs = step_costs(program, work_of(cluster, program.plan, layer_operations(MODEL), SEQUENCE))
    report = simulate(program, costs)
    passes = [each for each in program.instructions if each.op in (Op.FORWARD, Op.BACKWARD)]
    assert report.time_s["wait tensor"] == pytest.approx(
        math.fsum(costs.waits_inside(each).get(MessageClass.TENSOR, 0.0) for each in passes)
    )
    assert report.time_s["wait tensor"] > 0
    assert report.time_s["forward"] == pytest.approx(program.num_micros * sum(costs.forward_s))
    assert report.sent_bytes == step_bytes(cluster, program.plan, program.blocks, program.num_micros, SEQUENCE)


def test_the_critical_path_names_the_tiers_of_messages_inside() -> None:
    """Rows on the first tier, columns on the second, which is ten times as slow; the pieces fill the step."""
    cluster = cluster_of(2, 2)
    mapping = {"t0": {"tensor": {"columns": 2}}, "t1": {"tensor": {"rows": 2}}}
    plan = Plan(params="device", grads="device", optimizer="device", mapping=mapping)
    program = build(cluster, plan, block_specs(MODEL), 1, SEQUENCE)
    recording = record(program, step_costs(program, work_of(cluster, plan, layer_operations(MODEL), SEQUENCE)))
    path = critical_path(recording)
    assert sum(path.seconds.values()) == pytest.approx(recording.report.step_s)
    inside = {tier: spent for (tier, category), spent in path.seconds.items() if category == "tensor"}
    assert sum(inside.values()) == pytest.approx(recording.report.time_s["wait tensor"])
    assert inside["t1"] > inside["t0"] > 0
    by_hand = inside_seconds(program, Instruction(Op.FORWARD, 1, 0), MessageClass.TENSOR)
    assert set(by_hand) == {0, 1}


def test_changes_and_memory_over_the_step_know_the_tensor_axis() -> None:
    cluster = cluster_of(2, 2)
    program = program_of(cluster, 2, params="t1", grads="t1")

    def price(each: Program) -> Costs:
        return step_costs(each, work_of(each.cluster, each.plan, layer_operations(MODEL), SEQUENCE))

    recording = record(program, price(program))
    work = work_of(cluster, program.plan, layer_operations(MODEL), SEQUENCE)
    blocks = block_specs(MODEL)
    found = changes(
        Step(
            cluster=cluster,
            plan=program.plan,
            blocks=blocks,
            num_micros=program.num_micros,
            sequence=SEQUENCE,
            work=work,
        )
    )
    rounded = next(change for change in found if change.words == "int8 on tier t0")
    assert rounded.plan.wire["tensor"] == {"t0": "int8"}
    assert rounded.step_s < recording.report.step_s
    assert any(change.words == "bandwidth of tier t0 x 2" for change in found)
    curve = memory_curve(recording)
    assert max(curve.varying_bytes["gathered"]) == recording.report.memory_bytes["gathered"]
    assert max(curve.varying_bytes["grads_full"]) <= recording.report.memory_bytes["grads_full"]


def test_a_work_of_other_ranks_is_refused() -> None:
    program = program_of(cluster_of(2, 2), 2)
    work = work_of(program.cluster, program.plan, layer_operations(MODEL), SEQUENCE)
    with pytest.raises(PlanError, match="1 x 2 tensor ranks"):
        step_costs(program, replace(work, columns=2))
    with pytest.raises(PlanError, match="columns = 3 do not divide tensor = 4"):
        Work(layer=layer_operations(MODEL), sequence=8, tensor=4, columns=3)


def test_columns_share_products_and_the_stream_but_not_attention() -> None:
    """On a device whose memory costs nothing: 4 ranks share products, rows alone share the core."""
    device = replace(load_cluster("dgx-a100").device, memory_bandwidth_bytes_per_s=1e30)
    kernels = replace(device.kernels, gemm_half_depth=0.0, tiles=(), num_cores=0, launch_s=0.0, host_layer_s=0.0)
    device = replace(device, kernels=kernels)
    model = gpt(2, 4096, 32)
    whole, rows, columns = (
        block_seconds(device, Work(layer=layer_operations(model), sequence=1024, tensor=tensor, columns=c))
        for tensor, c in ((1, 1), (4, 1), (4, 4))
    )
    assert whole.weight_s == pytest.approx(4 * rows.weight_s) == pytest.approx(4 * columns.weight_s)
    assert whole.forward_s == pytest.approx(4 * rows.forward_s)
    products = whole.weight_s  # as long as the forward's
    assert columns.forward_s == pytest.approx(products / 4 + whole.forward_s - products)


# Korthikanti et al. 2205.05198, section 4 and Table 2, for 16-bit tensors: bytes over s b h. A flash kernel keeps what
# selective recomputation does; two masks of dropout, a byte an element, are left out.
FORMULAS: dict[tuple[bool, str], Any] = {
    (False, "none"): lambda t: 8 + 24 / t,
    (True, "none"): lambda t: 32 / t,
    (False, "full"): lambda t: 2,
    (True, "full"): lambda t: 2 / t,  # this runtime keeps a rank's part of the input alone
}


@pytest.mark.parametrize(("sequence_parallel", "recompute"), FORMULAS)
@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_a_plan_s_layer_keeps_what_the_published_formulas_say(sequence_parallel: bool, recompute: Any, t: int) -> None:
    """From the plan to the bytes, within 5 %; kernels of CUDA keep a little beside the formula."""
    cluster = load_cluster("dgx-a100")
    mapping = {"node": {"tensor": t, "data": 8 // t}}
    places: dict[str, Any] = {"params": "device", "grads": "device", "optimizer": "device"}
    plan = Plan(mapping=mapping, compute="bf16", sequence_parallel=sequence_parallel, **places)
    work = replace(work_of(cluster, plan, layer_operations(gpt(96, 12288, 96)), 2048), recompute=recompute)
    expected = 2048 * 12288 * FORMULAS[sequence_parallel, recompute](t)
    assert layer_activations(work, "cuda").kept_bytes == pytest.approx(expected, rel=0.05)


def test_columns_cut_the_stream_whether_or_not_tokens_are_split() -> None:
    work = Work(layer=layer_operations(LLAMA), sequence=64, tensor=4, columns=2, sequence_parallel=False)
    flat = replace(work, tensor=2, columns=1)
    # The rows see the same inside; the stream outside, 2 inputs of regions and 2 norms, is half.
    for block in block_specs(LLAMA)[-2:]:
        cut, whole = (activations_of(each, block, "cuda") for each in (work, flat))
        assert cut.input_bytes == whole.input_bytes / 2
        assert cut.kept_bytes < whole.kept_bytes
