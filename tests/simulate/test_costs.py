"""The price of blocks and steps: closed answers on an ideal device, and rules for every device."""

import math
from dataclasses import replace

import pytest

from bench.validation.rows import gpt
from terrace.base.errors import ClusterError, PlanError
from terrace.cluster.cluster import Device, Kernels
from terrace.cluster.presets import load_cluster, preset_names
from terrace.cluster.software import KernelForms, Software
from terrace.comm.pace import UNPACED
from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs, forward_flops, hardware_flops, model_flops
from terrace.model.config import ModelConfig, parse_model
from terrace.model.spec import Computes, freeze
from terrace.plan.presets import preset
from terrace.plan.recompute import OPERATIONS
from terrace.program.lowering import build, build_stages
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.kernels import attention_s, memory_s
from terrace.simulate.layers import block_seconds, operation_seconds, optimizer_s, seconds_of
from terrace.simulate.links import rate_bytes_per_s
from terrace.simulate.stages import simulate_stages
from terrace.simulate.work import Work
from terrace.train.calibrate import _measured
from tests.support.effort import lines_run

A100 = load_cluster("dgx-a100").device
IDEAL = replace(A100, kernels=Kernels())
COMPUTE_ONLY = replace(IDEAL, memory_bandwidth_bytes_per_s=1e30)
MEMORY_ONLY = replace(IDEAL, peak_flops_per_s={"bf16": 1e30})

GPT = gpt(4, 1024, 16, 512, 51200)
NEOX = parse_model(
    {
        "model_type": "gpt_neox",
        "vocab_size": 50432,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    }
)
LLAMA = parse_model(
    {
        "model_type": "llama",
        "vocab_size": 32000,
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
    }
)
FAMILIES = pytest.mark.parametrize("model", [GPT, NEOX, LLAMA], ids=lambda model: model.family)


@FAMILIES
def test_with_free_memory_a_forward_is_its_flops(model: ModelConfig) -> None:
    work = Work(layer=layer_operations(model), sequence=512, micro_batch=2, causal=False)
    for index, block in enumerate(block_specs(model)):
        seconds = seconds_of(COMPUTE_ONLY, work, block)
        flops = forward_flops(model, index, 2, 512)
        assert block.forward_flops(2, 512) == flops
        core = 4 * 2 * 512**2 * model.num_heads * model.head_dim if block.computes is Computes.RESIDUAL else 0
        assert seconds.forward_s * 312e12 == pytest.approx(flops, abs=1e-3)
        assert seconds.weight_s * 312e12 == pytest.approx(flops - core, abs=1e-3)
        assert seconds.input_s * 312e12 == pytest.approx(flops - core + 2.5 * core, abs=1e-3)


@FAMILIES
def test_tensor_and_context_ranks_share_the_flops(model: ModelConfig) -> None:
    whole = block_seconds(COMPUTE_ONLY, Work(layer=layer_operations(model), sequence=512, micro_batch=2))
    cut = block_seconds(
        COMPUTE_ONLY, Work(layer=layer_operations(model), sequence=512, micro_batch=2, tensor=4, ulysses=2)
    )
    assert cut.forward_s * 8 == pytest.approx(whole.forward_s)
    assert cut.backward_s * 8 == pytest.approx(whole.backward_s)


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_passes_of_a_gpt_layer_are_the_known_bytes(tensor: int) -> None:
    """(22 + 28/t) and (38 + 50/t) bytes an element of the residual stream, beside scores and products, with dropout,
    which adds 2 to each and 5 bytes a score.
    """
    work = Work(layer=layer_operations(GPT), sequence=512, tensor=tensor, sequence_parallel=False, flash=False)
    seconds = block_seconds(MEMORY_ONLY, work)
    core = attention_s(MEMORY_ONLY, batch=1, heads=16 // tensor, queries=512, keys=512, head_dim=64, flash=False)
    widths = [(1024, 3072), (1024, 1024), (1024, 4096), (4096, 1024)]
    cuts = [(k, n // tensor) if n >= k and index != 1 else (k // tensor, n) for index, (k, n) in enumerate(widths)]
    products = sum(512 * k + k * n + 512 * n for k, n in cuts) * 2 / 2.039e12
    element = 512 * 1024 / 2.039e12
    assert seconds.forward_s - core[0] - products == pytest.approx((20 + 28 / tensor) * element)
    assert seconds.input_s - core[1] - products == pytest.approx((36 + 50 / tensor) * element)
    software = Software(name="drops", kernels=KernelForms(flash=False, dropout=True))
    dropped, scores_s = (
        block_seconds(replace(MEMORY_ONLY, software=software), work),
        5 * 16 / tensor * 512 * 512 / 2.039e12,
    )
    assert dropped.forward_s - core[0] - products - scores_s == pytest.approx((22 + 28 / tensor) * element)
    assert dropped.input_s - core[1] - products - scores_s == pytest.approx((38 + 50 / tensor) * element)


@FAMILIES
@pytest.mark.parametrize("name", preset_names())
def test_no_preset_is_faster_than_its_peaks(name: str, model: ModelConfig) -> None:
    device = load_cluster(name).device
    ideal = replace(device, kernels=Kernels())
    for tensor in (1, 4):
        scalar = block_specs(replace(model, scalar_head=True))[-1]
        for block in (*block_specs(model), scalar):
            work = Work(layer=block.operations, sequence=512, tensor=tensor)
            real, best = block_seconds(device, work), block_seconds(ideal, work)
            for part in ("forward_s", "input_s", "weight_s"):
                assert getattr(best, part) <= getattr(real, part) < math.inf
            assert real.forward_s > best.forward_s or device.kernels == Kernels()


def test_sequence_parallelism_cuts_what_stands_outside_the_products() -> None:
    work = Work(layer=layer_operations(GPT), sequence=512, tensor=4)
    saved = block_seconds(MEMORY_ONLY, replace(work, sequence_parallel=False)).forward_s
    saved -= block_seconds(MEMORY_ONLY, work).forward_s
    assert saved == pytest.approx((1 - 1 / 4) * 20 * 512 * 1024 / 2.039e12)


@FAMILIES
def test_what_is_recomputed_is_priced(model: ModelConfig) -> None:
    work = Work(layer=layer_operations(model), sequence=512, flash=False)
    plain = block_seconds(A100, work)
    full = block_seconds(A100, replace(work, recompute="full"))
    assert plain.recompute_s == 0
    assert full.recompute_s == plain.forward_s
    assert full.backward_s == pytest.approx(plain.backward_s + plain.forward_s)


@FAMILIES
@pytest.mark.parametrize("flash", [True, False])
def test_operations_that_are_recomputed_are_priced(model: ModelConfig, flash: bool) -> None:
    """As they stand in a forward: attention as its kernel, an activation and norms as passes over memory."""
    work = Work(layer=layer_operations(model), sequence=512, flash=flash)
    parts = {name: operation_seconds(A100, work, (name,)) for name in OPERATIONS}
    core_s, _ = attention_s(
        A100,
        batch=1,
        heads=model.num_heads,
        queries=512,
        keys=512,
        head_dim=model.head_dim,
        flash=flash,
    )
    operands = 3 if model.gated_mlp else 2
    assert parts["attention"] == core_s
    assert parts["mlp"] == memory_s(A100, 2 * operands * 512 * model.intermediate_size)
    assert parts["norms"] == memory_s(A100, 2 * 4 * 512 * model.hidden_size, 2)
    plain = block_seconds(A100, work)
    some = block_seconds(A100, replace(work, operations=OPERATIONS))
    assert some.recompute_s == pytest.approx(sum(parts.values()))
    assert 0 < some.recompute_s < plain.forward_s
    assert (some.forward_s, some.input_s, some.weight_s) == (plain.forward_s, plain.input_s, plain.weight_s)


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb-h1"])
def test_a_step_that_recomputes_operations_takes_their_seconds(schedule: str | None) -> None:
    """In every layer that an entry names, once for each micro-batch; whole layers take longer."""
    cluster = load_cluster("dgx-a100").resized(1)
    mapping = {} if schedule is None else {"node": {"pipeline": 4, "data": 2}}
    # Stages whose messages are not hidden behind more or less of a backward, which would stretch it.
    stages = () if schedule is None else (3, 3, 2, 2)
    plan = replace(preset("ddp", cluster), compute="bf16", mapping=mapping, schedule=schedule, stages=stages)
    model = replace(LLAMA, num_layers=8)
    blocks, work = block_specs(model), Work(layer=layer_operations(model), sequence=512)
    compute_s = {}
    for recompute in ("", "layers.* every 2: attention", "layers.*: attention, mlp, norms", "layers.*"):
        programs = build_stages(cluster, replace(plan, recompute=(recompute,) if recompute else ()), blocks, 8, 512)
        step = simulate_stages(programs, [step_costs(program, work) for program in programs])
        compute_s[recompute] = [report.time_s["backward"] for report in step.reports]
    kept, half, some, whole = compute_s.values()
    layers, device = model.num_layers, cluster.device
    assert sum(half) - sum(kept) == pytest.approx(8 * -(-layers // 2) * operation_seconds(device, work, ("attention",)))
    assert sum(some) - sum(kept) == pytest.approx(8 * layers * operation_seconds(device, work, OPERATIONS))
    assert sum(some) < sum(whole)


def test_accumulating_reads_and_writes_the_gradient_once_more() -> None:
    embedding, layer, *_, head = block_specs(GPT)
    for block, weights in ((embedding, 51200 * 1024), (layer, 12 * 1024**2), (head, 51200 * 1024)):
        work = Work(layer=block.operations, sequence=512)
        once, more = (block_seconds(MEMORY_ONLY, work, accumulate=again) for again in (False, True))
        assert (more.weight_s - once.weight_s) * 2.039e12 == pytest.approx(6 * weights)
        assert (more.forward_s, more.input_s) == (once.forward_s, once.input_s)


def test_a_small_layer_waits_for_its_host() -> None:
    slow = replace(A100, kernels=replace(A100.kernels, host_layer_s=1.0))
    seconds = block_seconds(slow, Work(layer=layer_operations(GPT), sequence=512))
    assert seconds.forward_s == 1.0
    assert seconds.input_s + seconds.weight_s == pytest.approx(1.0)


def test_a_shape_is_priced_with_little_effort() -> None:
    """The search prices thousands."""
    work = Work(layer=layer_operations(LLAMA), sequence=512, micro_batch=7)
    assert lines_run(lambda: block_seconds(A100, work)) < 1500


def test_the_optimizer_moves_44_bytes_a_parameter() -> None:
    assert optimizer_s(IDEAL, 1e9) * 2.039e12 == pytest.approx(44e9)
    assert optimizer_s(A100, 0) == pytest.approx(A100.kernels.optimizer_s + A100.kernels.launch_s)


# FLOPs


def test_flops_are_the_published_formulas() -> None:
    batch, sequence, layers, hidden, vocab = 8, 512, 4, 1024, 51200
    unit = batch * sequence * layers * hidden**2
    attention, head = sequence / hidden, vocab / (layers * hidden)
    assert model_flops(GPT, sequence, batch) == pytest.approx(72 * unit * (1 + attention / 6 + head / 12))
    full = hardware_flops(GPT, sequence, batch)
    assert full == pytest.approx(96 * unit * (1 + attention / 6 + head / 16))


# Costs of a program


def _program(num_micros: int = 2, **changes: object):  # type: ignore[no-untyped-def]
    cluster = load_cluster("dgx-a100")
    plan = replace(preset("zero3", cluster), compute="bf16", **changes)  # type: ignore[arg-type]
    return build(cluster, plan, block_specs(LLAMA), num_micros)


def test_step_costs_take_work() -> None:
    program = _program()
    costs = step_costs(program, Work(layer=layer_operations(LLAMA), sequence=512))
    layer = block_seconds(A100, Work(layer=layer_operations(LLAMA), sequence=512), accumulate=True)
    assert costs.forward_s[1] == layer.forward_s
    assert costs.backward_s[1] == layer.input_s + layer.weight_s
    constants = A100.kernels.optimizer_s + len(program.blocks) * A100.kernels.launch_s
    owned = sum(program.layout.padded(block.num_trainable) // 16 for block in program.blocks)
    assert sum(costs.update_s) == pytest.approx(constants + owned * 44 / (0.93 * 2.039e12))
    assert simulate(program, costs).step_s > 2 * sum(costs.forward_s) + 2 * sum(costs.backward_s)


def test_the_optimizer_s_constant_counts_once_where_the_last_block_is_frozen() -> None:
    cluster, blocks = load_cluster("dgx-a100"), block_specs(LLAMA)
    frozen = freeze(blocks, (f"{blocks[-1].name}.*",))
    program = build(cluster, replace(preset("zero3", cluster), compute="bf16"), frozen, 2)
    work = Work(layer=layer_operations(LLAMA), sequence=512)
    update_s, whole_s = step_costs(program, work).update_s, step_costs(_program(), work).update_s
    assert update_s[:-2] == whole_s[:-2]
    assert update_s[-2] == pytest.approx(whole_s[-2] + A100.kernels.optimizer_s)
    assert simulate(program, step_costs(program, work)).time_s["update"] == pytest.approx(sum(update_s[:-1]))


def test_work_that_is_not_the_plan_s_is_refused() -> None:
    program = _program()
    for work, message in (
        (Work(layer=layer_operations(LLAMA), sequence=512, micro_batch=3), "3 sequences in bf16"),
        (Work(layer=layer_operations(LLAMA), sequence=512, compute="fp32"), "1 sequences in fp32"),
        (Work(layer=layer_operations(LLAMA), sequence=512, recompute="full"), "the plan says what is recomputed"),
        (Work(layer=layer_operations(LLAMA), sequence=512, operations=("mlp",)), "the plan says what is recomputed"),
    ):
        with pytest.raises(PlanError, match=message):
            step_costs(program, work)


def test_blocks_are_priced_at_their_own_sizes() -> None:
    program = _program()
    work = Work(layer=layer_operations(LLAMA), sequence=512)
    other = replace(work, layer=layer_operations(replace(LLAMA, intermediate_size=8, num_layers=1)))
    assert step_costs(program, other) == step_costs(program, work)
    wide = replace(
        program.blocks[1], declared=layer_operations(replace(LLAMA, intermediate_size=64 * LLAMA.intermediate_size))
    )
    blocks = (program.blocks[0], wide, *program.blocks[2:])
    costs = step_costs(replace(program, model=replace(program.model, blocks=blocks)), work)
    assert costs.forward_s[1] > costs.forward_s[2] == step_costs(program, work).forward_s[2]


def test_what_a_run_measures_is_not_scaled_again() -> None:
    tier = load_cluster("perlmutter").tiers[0]
    measured = _measured(tier, 2e-6, 5e9, UNPACED)
    cluster = replace(load_cluster("perlmutter"), tiers=(measured,))
    assert rate_bytes_per_s(cluster, 0, 1.0, degree=2) == 5e9
    assert measured.marks == {"latency_s": "measured", "bandwidth_bytes_per_s": "measured"}


def test_kernels_that_cannot_be_are_refused() -> None:
    cluster = load_cluster("dgx-a100")
    for kernels, message in (
        (Kernels(gemm=1.5), r"kernels\.gemm = 1\.5 must lie between 1e-06 and 1"),
        (Kernels(memory=0.0), r"kernels\.memory = 0\.0"),
        (Kernels(attention=math.nan), r"kernels\.attention = nan"),
        (Kernels(attention_backward=1.5), r"kernels\.attention_backward = 1\.5"),
        (Kernels(attention_half_keys=-1.0), r"kernels\.attention_half_keys = -1\.0"),
        (Kernels(launch_s=-1.0), r"kernels\.launch_s = -1\.0"),
        (Kernels(tiles=((0, 128, 1.0),)), "a tile of 0 x 128"),
        (Kernels(tiles=((128, 128, 2.0),)), "share of a tile"),
    ):
        with pytest.raises(ClusterError, match=message):
            replace(cluster, device=replace(A100, kernels=kernels))


def test_marks_name_constants() -> None:
    cluster = load_cluster("dgx-a100")

    def marked(device: Device) -> None:
        replace(cluster, device=device)

    marked(replace(A100, marks={"kernels.gemm": "measured", "peak_flops_per_s.bf16": "fitted"}))
    with pytest.raises(ClusterError, match=r"names 'kernels\.gem'.*did you mean 'kernels\.gemm'"):
        marked(replace(A100, marks={"kernels.gem": "measured"}))
    with pytest.raises(ClusterError, match="'guessed' is no mark"):
        marked(replace(A100, marks={"kernels.gemm": "guessed"}))  # type: ignore[dict-item]
    tier = replace(cluster.tiers[0], marks={"size_bytes": "measured"})
    with pytest.raises(ClusterError, match=r"tiers\.node\.marks names 'size_bytes'"):
        replace(cluster, tiers=(tier, *cluster.tiers[1:]))
