"""Optimizers other than AdamW: under every plan the numbers of one plain process, and the state and bytes of the
formulas.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.base.errors import ConfigError, PlanError
from terrace.checkpoint.layout import block_layouts
from terrace.launch.start import LocalPool, World
from terrace.plan.flats import block_flats, orthogonalised
from terrace.plan.kinds import Kinds
from terrace.plan.plan import Plan
from terrace.plan.projected import products_of_a_rank
from terrace.plan.wire import MessageClass
from terrace.program.instruction import Instruction, Op
from terrace.program.lowering import build, build_stages
from terrace.runtime.batch import Batch
from terrace.runtime.engine import Engine
from terrace.runtime.muon import newton_schulz
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.simulate.cost import step_costs
from terrace.simulate.events import simulate
from terrace.simulate.footprint import footprint
from terrace.simulate.states import model_states, stage_blocks
from tests.support.byte_formula import step_bytes
from tests.support.differing import differing, undeclared
from tests.support.nightly import in_turns
from tests.support.optimizer_reference import NUM_STEPS, plain_newton_schulz, serial
from tests.support.parity import TOLERANCE, Case, case_words, deviation, exact, num_rows, run
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.state_formula import model_state_bytes
from tests.support.totals import verify, verify_stages
from tests.support.toys import MODELS, SEQUENCE, TIER_NAMES, cluster_of, make_batch

Sizes = tuple[int, ...]

LION = OptimizerConfig(name="lion", lr=1e-3, beta1=0.9, beta2=0.99)
MUON = OptimizerConfig(name="muon", lr=3e-3, adamw_lr=1e-3, momentum=0.9)
SGD = OptimizerConfig(name="sgd", lr=3e-2, weight_decay=0.5)
MOMENTUM = replace(SGD, momentum=0.9)
GALORE = OptimizerConfig(name="galore", lr=3e-3, adamw_lr=1e-3, rank=3, check_every=2)
LSP = OptimizerConfig(name="lsp", lr=3e-3, rank=3, density=2, check_every=2, alpha=0.4, scale=2.0)
PROJECTED = {"galore": GALORE, "lsp": LSP}
ALL = {"lion": LION, "muon": MUON, "sgd": SGD, "sgd, momentum": MOMENTUM, **PROJECTED}


# Models without parameters whose gradient is zero but for rounding, of which Lion would take the sign.
CASES: list[tuple[Sizes, Case]] = [
    ((1,), Case(exact("ddp", cluster_of(1)), model="llama tied")),
    ((2, 2), Case(exact("ddp", cluster_of(2, 2)), num_micros=2)),
    ((2, 2), Case(exact("zero1", cluster_of(2, 2)), model="llama tied")),
    ((3,), Case(exact("zero2", cluster_of(3)), num_micros=2)),
    ((2, 2), Case(exact("zero3", cluster_of(2, 2)), num_micros=2, model="llama tied")),
    ((2, 2), Case(exact("zero++", cluster_of(2, 2)), lane="lazy")),
    ((2, 2, 2), Case(exact("three-level", cluster_of(2, 2, 2)), model="llama, frozen layer")),
    ((2, 2), Case(pipelined("zero1", OUTER, "1f1b"), num_micros=2, model="llama tied")),
    ((4,), Case(pipelined("ddp", ALONE, "zb-h1"), num_micros=4, model="deep llama tied")),
    ((2, 2, 2), Case(exact("hsdp", cluster_of(2, 2, 2)), model="toy", lane="eager")),
    ((1,), Case(exact("ddp", cluster_of(1)), model="stacks")),
    ((2, 2, 2), Case(exact("three-level", cluster_of(2, 2, 2)), model="stacks")),
    ((1,), Case(exact("ddp", cluster_of(1)), num_micros=2, model="mixture, grouped")),
]
# Plans that cut matrices, which GaLore and LSP refuse: over rows, columns, both, rows of experts, in a pipeline.
ROWS, BOTH = {"package": {"tensor": 2}}, {"node": {"tensor": {"rows": 2, "columns": 2}}}
CUTTING: list[tuple[Sizes, Case]] = [
    ((2, 2), Case(exact("zero1", cluster_of(2, 2), mapping=ROWS), num_micros=2, model="wide llama, 1 kv head")),
    ((2, 4), Case(exact("zero3", cluster_of(2, 4), mapping=BOTH), model="wide gpt_neox")),
    ((4,), Case(exact("ddp", cluster_of(4), mapping={"package": {"tensor": 4}}), model="wide llama, 8 kv heads")),
    ((2, 2), Case(exact("zero3", cluster_of(2, 2), experts={"node": {"rows": 2}}), model="experts")),
]
CUTTING_BY_NIGHT: list[tuple[Sizes, Case]] = [
    ((2, 2), Case(exact("zero3", cluster_of(2, 2), mapping=ROWS), num_micros=2, model="wide linear")),
    ((2, 2), Case(exact("zero3", cluster_of(2, 2), mapping=ROWS), num_micros=2, model="latent")),
    ((4,), Case(exact("ddp", cluster_of(4), mapping={"package": {"tensor": {"columns": 4}}}), model="wide gpt2")),
    (
        (2, 2, 2),
        Case(
            exact("zero3", cluster_of(2, 2, 2), mapping={"package": {"tensor": 2}, "system": {"pipeline": 2}}),
            num_micros=2,
            model="deep llama tied",
        ),
    ),
    ((2, 2), Case(exact("zero1", cluster_of(2, 2), mapping=ROWS), model="experts")),
    (
        (2, 2, 2),
        Case(
            exact("zero1", cluster_of(2, 2, 2), experts={"package": {"rows": 2}, "node": {"expert": 2}}),
            model="experts",
        ),
    ),
]
NIGHTLY: list[tuple[Sizes, Case]] = [
    ((2, 2), Case(exact("zero3", cluster_of(2, 2)), num_micros=2, model="mixture, grouped")),
    ((2, 2), Case(pipelined("zero1", OUTER, "zbv"), num_micros=4, model="mixture, shared expert")),
    ((2, 2, 2), Case(exact("three-level", cluster_of(2, 2, 2)), model="mixture, frozen experts")),
]


# A gate of one row has no space three wide.
WIDE_ENOUGH = [
    row for row in (*CASES, *NIGHTLY) if row[1].model not in ("mixture, shared expert", "mixture, frozen experts")
]
EACH = [name for name in ALL if name not in PROJECTED]
# Which expert a matrix is decides what is drawn for its projectors.
APART = (2, 2), Case(exact("zero3", cluster_of(2, 2), experts={"package": {"expert": 2}}), model="experts")
TURNS = [*in_turns(4, EACH, [*CASES, *NIGHTLY]), *in_turns(4, PROJECTED, WIDE_ENOUGH), ("lsp", APART)]
# The weights of convolutions are AdamW's, and decay.
CONVOLVING = (2, 2), Case(exact("zero1", cluster_of(2, 2)), num_micros=2, model="linear")
TURNS += [("muon", row) for row in CUTTING]
TURNS += [("muon", CONVOLVING), pytest.param("galore", CONVOLVING, marks=pytest.mark.nightly)]
TURNS += [pytest.param("muon", row, marks=pytest.mark.nightly) for row in CUTTING_BY_NIGHT]


@pytest.mark.parametrize(("name", "row"), TURNS, ids=case_words)
def test_every_plan_equals_one_process(pool: LocalPool, name: str, row: tuple[Sizes, Case]) -> None:
    (sizes, case), optimizer = row, ALL[name]
    cluster = cluster_of(*sizes)
    case = replace(case, optimizer=optimizer, num_steps=NUM_STEPS)
    (outcomes,) = run(pool, cluster, [case])
    found = deviation(outcomes, serial(case.model, num_rows(cluster, case), optimizer))
    assert max(found.values()) < TOLERANCE, found
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


def measured_state(world: World, sizes: Sizes, plan: Plan, model: str, optimizer: OptimizerConfig) -> dict[str, int]:
    """The meter's peaks after two steps on this rank."""
    built = MODELS[model]
    engine = Engine(
        Blocks(built.blocks(torch.float64), declared=built.declared),
        Workload(cluster=cluster_of(*sizes), plan=plan, num_micros=1, sequence=SEQUENCE),
        built.objective,
        Training(optimizer=optimizer),
        RankSetup(rank=world.rank),
    )
    for step in range(2):
        tokens, labels = make_batch(step, world.world_size)
        engine.step([Batch(tokens[world.rank :][:1], labels[world.rank :][:1])], 1e-3)
    engine.check_bytes()
    peak = engine.report({}).memory_bytes
    engine.close()
    return dict(peak)


@pytest.mark.parametrize(
    ("name", "rule", "mapping"),
    [
        *in_turns(2, ["ddp", "zero1", "three-level"], ALL, [{}]),
        *in_turns(2, ["zero1", "ddp"], ["muon"], [{"node": {"tensor": 2}}, ROWS]),
    ],
)
def test_state_and_buffers_are_what_the_formula_says(
    pool: LocalPool, name: str, rule: str, mapping: dict[str, Any]
) -> None:
    cluster, optimizer = cluster_of(2, 2), ALL[rule]
    plan = replace(exact(name, cluster, update=optimizer.update, mapping=mapping), compute="fp32")
    blocks = build(cluster, plan, MODELS["llama tied"].declared, 1, SEQUENCE).blocks
    said = model_state_bytes(cluster, plan, blocks, 1, SEQUENCE)
    found = pool.run(4, measured_state, (2, 2), plan, "llama tied", optimizer, timeout_s=60.0)
    assert max(each["optimizer"] for each in found) == said["optimizer"]
    assert all(each["buffers"] == said["buffers"] for each in found)
    # Muon's whole matrices included, in the account of plan, scale and doctor too.
    account = footprint(cluster, plan, Kinds.of(MODELS["llama tied"].declared), SEQUENCE, 1, phase="update")
    assert account["buffers"] == said["buffers"]
    adamw = model_state_bytes(cluster, replace(plan, update="adamw"), blocks, 1, SEQUENCE)
    if optimizer != LSP or name == "ddp":  # ranks that share a matrix all hold its projectors and moments
        assert said["optimizer"] < adamw["optimizer"]
    if optimizer == SGD:  # the masters, which are in fp64, and nothing else
        assert 3 * said["optimizer"] == adamw["optimizer"]
        one = replace(plan, compute="fp64")  # one memory with the parameters
        assert model_state_bytes(cluster, one, blocks, 1, SEQUENCE)["optimizer"] == 0


def test_bytes_of_muon_are_the_layers_once_from_the_optimizer_tier() -> None:
    cluster, blocks = cluster_of(2, 4), MODELS["llama tied"].declared
    for name, outermost in (("ddp", -1), ("hsdp", 1), ("zero1", 1)):
        plan = exact(name, cluster, update="muon")
        padded = sum(flats[0].padded for flats in block_flats(cluster, plan, blocks)[1:-1])
        sent = step_bytes(cluster, plan, blocks, 1)
        whole = {tier: sent.get((MessageClass.ORTHOGONALISE, tier), 0) for tier in ("package", "node")}
        assert whole == (
            {"package": padded // 2 * 8, "node": padded // 8 * 3 * 8} if outermost > 0 else {"package": 0, "node": 0}
        )
        without = step_bytes(cluster, replace(plan, update="lion"), blocks, 1)
        assert without == {key: size for key, size in sent.items() if key[0] is not MessageClass.ORTHOGONALISE}


def test_bytes_of_cut_matrices_are_those_of_all_their_parts() -> None:
    # P elements of a layer on each of 2 columns x 2 rows, whose optimizer states 2 data ranks cut.
    mapping = {"package": {"tensor": {"columns": 2}}, "system": {"tensor": 2}}
    cluster, blocks = cluster_of(2, 2, 2), MODELS["wide llama, 8 kv heads"].declared
    for name, of_data in (("zero1", 1), ("ddp", 0)):
        program = build(cluster, exact(name, cluster, update="muon", mapping=mapping), blocks, 1, SEQUENCE)
        numel = [flats[0].padded for flats in program.model.flats[1:-1]]
        sent = {tier: program.sent_bytes.get((MessageClass.ORTHOGONALISE, tier), 0) for tier in TIER_NAMES[:3]}
        # The outermost tier first, so that the innermost one carries both parts.
        assert sent == {"system": sum(numel) * 8, "node": of_data * sum(numel) // 2 * 8, "package": 2 * sum(numel) * 8}
        (message,) = {program.message(each) for each in program.instructions if str(each) == "ORTHOGONALISE b1"}
        assert message.lane == 2


def test_the_program_gathers_a_layer_while_the_one_before_is_updated() -> None:
    cluster = cluster_of(2)
    program = build(cluster, exact("zero1", cluster, update="muon"), MODELS["llama tied"].declared, 1)
    end = [str(each) for each in program.instructions[program.instructions.index(Instruction(Op.CLIP)) :]]
    assert end[:7] == [
        "CLIP",
        "ORTHOGONALISE b1",
        "UPDATE b0",
        "REFRESH b0",
        "ORTHOGONALISE b2",
        "UPDATE b1",
        "REFRESH b1",
    ]
    missing = tuple(each for each in program.instructions if str(each) != "ORTHOGONALISE b2")
    with pytest.raises(Exception, match="UPDATE b2`: it needs `ORTHOGONALISE b2` before it"):
        verify(replace(program, instructions=missing))
    elsewhere = (*program.instructions, Instruction(Op.ORTHOGONALISE, 0))
    with pytest.raises(Exception, match="no matrices that the optimizer updates as wholes"):
        verify(replace(program, instructions=elsewhere))
    verify_stages(
        build_stages(
            cluster_of(2, 2), pipelined("zero1", OUTER, update="muon"), MODELS["deep gpt2"].declared, 2, SEQUENCE
        )
    )


def test_the_simulator_prices_the_products_and_the_message() -> None:
    cluster, blocks = cluster_of(4), MODELS["llama tied"].declared
    slow = replace(cluster, device=replace(cluster.device, peak_flops_per_s={"fp64": 1e6}))
    flops = [1.0] * len(blocks)
    plans = {name: exact("zero1", slow, update=name) for name in ("adamw", "muon")}
    programs = {name: build(slow, plan, blocks, 1) for name, plan in plans.items()}
    reports = {name: simulate(program, step_costs(program, flops)) for name, program in programs.items()}
    more_s = reports["muon"].time_s["update"] - reports["adamw"].time_s["update"]
    products = [
        each
        for flats in programs["muon"].model.flats[1:-1]
        for each in products_of_a_rank("muon", flats[0].matrix_slices)
    ]
    assert more_s == pytest.approx(sum(2 * times * m * k * n for times, m, k, n in products) / 1e6, rel=0.05)
    assert reports["muon"].sent_bytes[MessageClass.ORTHOGONALISE, "package"] > 0
    whole = build(slow, exact("ddp", slow, update="muon"), blocks, 1)
    every = [sorted(param.shape) for param in blocks[1].params if len(param.shape) == 2]
    # Five iterations of X X^T, its square and the result times X: 4 s^2 l + 2 s^3 with sides s <= l.
    iterations = products_of_a_rank("muon", whole.model.flats[1][0].matrix_slices)
    assert sum(2 * times * m * k * n for times, m, k, n in iterations) == 5 * sum(
        4 * short**2 * long + 2 * short**3 for short, long in every
    )


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (1, 5), (5, 1)])
def test_newton_schulz_makes_singular_values_about_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = newton_schulz(matrix, 5)
    torch.testing.assert_close(found, plain_newton_schulz(matrix), rtol=1e-10, atol=1e-12)
    # Where the published eps shows: near it, and below it, where the update vanishes with the gradient.
    for scale in (1e-6, 1e-7, 1e-9, 1e-30):
        torch.testing.assert_close(newton_schulz(scale * matrix, 5), plain_newton_schulz(scale * matrix))
    assert newton_schulz(1e-30 * matrix, 5).norm() < 1e-15
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.6
    assert values.max() < 1.3
    assert newton_schulz(torch.zeros(shape), 5).abs().max() == 0
    for dtype in (torch.float32, torch.bfloat16):  # whose squares are zero
        assert newton_schulz((1e-30 * matrix).to(dtype), 5).abs().max() < 1e-15, dtype
    assert (newton_schulz(matrix.bfloat16(), 5).double() - found).norm() / found.norm() < 0.1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"name": "lion", "eps": 1e-6}, "optimizer.eps = 1e-06 has no effect under optimizer.name = 'lion'"),
        ({"momentum": 0.9}, "optimizer.momentum = 0.9 has no effect under optimizer.name = 'adamw'"),
        ({"name": "muon", "newton_schulz_steps": 0}, "must be at least 1"),
        ({"name": "muon", "momentum": 1.0}, "optimizer.momentum = 1.0 must be at least 0 and below 1"),
        ({"name": "sgd", "beta1": 0.8}, "optimizer.beta1 = 0.8 has no effect under optimizer.name = 'sgd'"),
        ({"name": "sgd", "momentum": -0.1}, "optimizer.momentum = -0.1 must be at least 0 and below 1"),
        ({"name": "muon", "lr": 0.0, "adamw_lr": 0.1}, "the schedule is of optimizer.lr, which is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        OptimizerConfig(**values)


def test_muon_takes_the_matrices_of_blocks_that_say_they_are_layers() -> None:
    config, cluster = MODELS["llama tied"].config, cluster_of(2)
    assert config is not None
    plan = exact("zero1", cluster, update="muon")
    headless, two_tables = differing(config)[2:]
    for blocks, layers in ((headless, [1, 2]), (two_tables, [2, 3]), (undeclared(config)[0], [1, 2])):
        program = build(cluster, plan, blocks, 1, SEQUENCE)
        assert orthogonalised(program.model.flats, range(len(blocks))) == layers
        groups = [{group for group, _ in params.values()} for params in block_layouts(blocks, MUON).values()]
        assert [index for index, of_block in enumerate(groups) if "muon" in of_block] == layers
        kinds = Kinds.of(blocks)
        states = model_states(cluster, plan, kinds, stage_blocks(kinds, range(len(blocks))), 1)
        assert states.steady["optimizer"] == program.state_bytes["optimizer"]


def test_muon_is_refused_where_matrices_are_missing() -> None:
    cluster, blocks = cluster_of(2), MODELS["llama tied"].declared
    with pytest.raises(PlanError, match="'muon' has no effect: no layer has a matrix that trains"):
        build(cluster, exact("ddp", cluster, update="muon"), [blocks[0], blocks[-1]], 1)
    model = MODELS["toy"]
    with pytest.raises(PlanError, match="the plan is for the optimizer 'lion', the settings are of 'adamw'"):
        Engine(
            Blocks(model.blocks(torch.float64)),
            Workload(cluster=cluster_of(1), plan=exact("ddp", cluster_of(1), update="lion"), num_micros=1),
            model.objective,
        )
