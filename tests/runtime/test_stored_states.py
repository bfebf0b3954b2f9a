"""Optimizer states in bf16 and in 8-bit blocks, and parameters in bf16: the numbers of one plain process, under every
plan, with the bytes of the formula.
"""

from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from terrace.base.errors import PlanError
from terrace.launch.start import LocalPool, World
from terrace.model.params import ParamSpec
from terrace.plan.kinds import Kinds
from terrace.plan.layout import state_layout
from terrace.plan.plan import Plan
from terrace.plan.state_formats import state_bytes
from terrace.plan.validate import validate
from terrace.program.lowering import build
from terrace.runtime.adamw import ShardedAdamW
from terrace.runtime.batch import Batch
from terrace.runtime.block_codes import decode, encode
from terrace.runtime.engine import Engine
from terrace.runtime.noise import Noise, round_to_bf16
from terrace.runtime.optimizer import make_optimizer
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.setup import Blocks, RankSetup, Training, Workload
from terrace.runtime.stored import Storage
from terrace.simulate.states import model_states, stage_blocks
from tests.support import stored_reference as plain
from tests.support.nightly import in_turns, nightly
from tests.support.parity import TOLERANCE, Case, Outcome, case_words, deviation, exact, num_rows, run
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.state_formula import model_state_bytes
from tests.support.toys import MODELS, cluster_of, make_batch

Sizes = tuple[int, ...]
ADAMW = OptimizerConfig(lr=3e-3)
OPTIMIZERS = {
    "adamw": ADAMW,
    "lion": OptimizerConfig(name="lion", lr=1e-3, beta2=0.99),
    "sgd": OptimizerConfig(name="sgd", lr=3e-2, momentum=0.9),
    "muon": OptimizerConfig(name="muon", lr=3e-3),
}
CPU = torch.device("cpu")


NUM_STEPS = 3  # the third starts from states that were coded twice


@cache
def reference(model: str, batch: int, optimizer: str, states: str, num_slices: int) -> Outcome:
    return plain.serial(model, batch, NUM_STEPS, OPTIMIZERS[optimizer], states, num_slices)


CASES: list[tuple[Sizes, Case]] = [
    ((1,), Case(exact("ddp", cluster_of(1)), model="llama tied")),
    ((2, 2), Case(exact("zero1", cluster_of(2, 2)), num_micros=2, model="llama tied")),
    ((3,), Case(exact("zero2", cluster_of(3)), model="toy")),
    ((2, 2), Case(exact("zero3", cluster_of(2, 2)), model="llama, frozen layer")),
    ((2, 2, 2), Case(exact("three-level", cluster_of(2, 2, 2)), model="llama tied")),
    ((2, 2), Case(pipelined("zero1", OUTER, "1f1b"), num_micros=2, model="llama tied")),
    ((4,), Case(pipelined("ddp", ALONE, "zb-h1"), num_micros=4, model="deep llama tied")),
]


NARROW: tuple[Literal["bf16", "int8"], ...] = ("bf16", "int8")


BOTH = [("adamw", states) for states in NARROW]
# On eight ranks every optimizer, each with one format by day and with the other by night.
BY_DAY, BY_NIGHT = (
    [(name, NARROW[(index + by_night) % 2]) for index, name in enumerate(OPTIMIZERS)] for by_night in (0, 1)
)


@pytest.mark.parametrize(
    ("sizes", "case", "settings"),
    [
        (*CASES[1], BOTH),
        (*CASES[4], BY_DAY),
        (*CASES[5], BOTH),
        *nightly((*CASES[4], BY_NIGHT), *((*each, BOTH) for each in (*CASES[:1], *CASES[2:4], *CASES[6:]))),
    ],
    ids=case_words,
)
def test_every_plan_equals_one_process(
    pool: LocalPool, sizes: Sizes, case: Case, settings: list[tuple[str, Literal["bf16", "int8"]]]
) -> None:
    cluster, layout = cluster_of(*sizes), state_layout(cluster_of(*sizes), case.plan)
    cases = [
        replace(case, optimizer=OPTIMIZERS[name], plan=replace(case.plan, optimizer_states=states), num_steps=NUM_STEPS)
        for name, states in settings
    ]
    for (name, states), outcomes in zip(settings, run(pool, cluster, cases), strict=True):
        wanted = reference(case.model, num_rows(cluster, case), name, states, layout.span(layout.optimizer))
        found = deviation(outcomes, wanted)
        assert max(found.values()) < TOLERANCE, (name, states, found)
        assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


SPREAD = [
    Case(exact("zero3", cluster_of(2, 2), mapping={"package": {"tensor": 2}}), model="llama tied"),
    Case(exact("zero1", cluster_of(2, 2), mapping={"package": {"tensor": {"columns": 2}}}), model="llama tied"),
    Case(exact("zero3", cluster_of(2, 2), experts={"node": {"expert": 2}}), model="experts"),
    Case(exact("zero2", cluster_of(2, 2), experts={"node": {"rows": 2}}), model="experts"),
]


def test_random_bits_are_of_the_whole_parameter(pool: LocalPool) -> None:
    """Where a rank has a part of the rows or columns of a matrix, or of the experts, bf16 states are rounded alike."""
    cluster = cluster_of(2, 2)
    cases = [replace(case, plan=replace(case.plan, optimizer_states="bf16"), num_steps=NUM_STEPS) for case in SPREAD]
    for case, outcomes in zip(cases, run(pool, cluster, cases), strict=True):
        found = deviation(outcomes, reference(case.model, num_rows(cluster, case), "adamw", "bf16", 1))
        assert max(found.values()) < TOLERANCE, (case.plan, found)


def test_the_references_rounding_is_seen() -> None:
    """Other states, another seed or slices change the reference by far more than the tolerance."""
    exactly = plain.serial("llama tied", 4, 3, ADAMW, "bf16").parameters
    for states, slices in (("int8", 1), ("int8", 3)):
        other = plain.serial("llama tied", 4, 3, ADAMW, states, slices).parameters
        assert (other - exactly).abs().max() > 1e-6, (states, slices)


def test_bits_equal_their_definition() -> None:
    params = [ParamSpec(name="a", shape=(5, 7)), ParamSpec(name="b", shape=()), ParamSpec(name="c", shape=(3, 2, 4))]
    noise = Noise(3, "x", params, [(0, 0), (), (0, 0, 0)], 60)
    wanted = np.concatenate(
        [plain.bits(3, "x", name, "m", 2, numel) for name, numel in (("a", 35), ("b", 1), ("c", 24))]
    )
    assert noise.bits("m", 2, 0, 60, CPU).tolist() == wanted.tolist()
    for start, stop in ((1, 2), (3, 36), (35, 36), (34, 60), (7, 50)):  # padding behind the parameters has any bits
        assert noise.bits("m", 2, start, stop + 4, CPU)[: stop - start].tolist() == wanted[start:stop].tolist()


@pytest.mark.parametrize("offsets", [(2, 0, 0), (0, 3, 0), (1, 0, 5), (2, 3, 5)])
def test_bits_of_a_slice_are_those_of_its_place(offsets: tuple[int, int, int]) -> None:
    whole, shape = (4, 6, 9), tuple(size - offset for size, offset in zip((4, 6, 9), offsets, strict=True))
    every = torch.from_numpy(plain.bits(0, "x", "w", "m", 1, 4 * 6 * 9)).view(whole)
    part = every[tuple(slice(offset, None) for offset in offsets)].flatten()
    found = Noise(0, "x", [ParamSpec(name="w", shape=shape, whole=whole)], [offsets], part.numel())
    assert found.bits("m", 1, 0, part.numel(), CPU).tolist() == part.tolist()
    assert found.bits("m", 1, 5, 17, CPU).tolist() == part[5:17].tolist()


def test_rounding_is_right_on_average_and_keeps_what_bf16_has() -> None:
    noise = Noise(0, "x", [ParamSpec(name="w", shape=(1 << 16,))], [(0,)], 1 << 16)
    random, out = noise.bits("m", 1, 0, 1 << 16, CPU), torch.empty(1 << 16, dtype=torch.bfloat16)
    assert float(random.double().mean()) == pytest.approx(32767.5, abs=5 * 18918 / 256)
    for value in (1.0 + 2.0**-10, -3.1, 1e-30):
        round_to_bf16(torch.full((1 << 16,), value), random, out)
        below, above = sorted({float(each) for each in out.tolist()})
        share = (value - below) / (above - below)
        deviation = (share * (1 - share) / 65536) ** 0.5
        assert float((out == above).double().mean()) == pytest.approx(share, abs=5 * deviation)
    kept = torch.randn(1 << 16).bfloat16()
    kept[:4] = torch.tensor([0.0, -0.0, float("inf"), 3.0e38])
    round_to_bf16(kept.float(), random, out)
    assert torch.equal(out.view(torch.int16), kept.view(torch.int16))


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("lead", [0, 100])
def test_codes_are_the_nearest_points_and_stay_when_coded_again(signed: bool, lead: int) -> None:
    generator = torch.Generator().manual_seed(lead)
    numel = 5 * 256 - lead - 7
    values = torch.randn(numel, generator=generator) * torch.exp(5 * torch.randn(numel, generator=generator))
    values = values if signed else values.square()
    values[40:50] = 0.0
    values[-300:] *= 1e-39  # a block beyond what fp32 holds exactly, and part of another
    found, again = [], values
    for _ in range(2):
        buffer, out = torch.zeros(1280), torch.empty(1280)
        buffer[lead : lead + numel] = again
        codes = torch.zeros(numel, dtype=torch.int8 if signed else torch.uint8)
        scales = torch.zeros(5)
        encode(buffer, lead, signed, codes, scales)
        decode(codes, scales, lead, signed, out)
        assert not out[:lead].any()
        assert not out[lead + numel :].any()
        again = out[lead : lead + numel].clone()
        found.append(again)
    edges = [0, *range(256 - lead, numel, 256), numel]
    blocks = [plain.coded(values[first:last].numpy(), signed) for first, last in pairwise(edges)]
    assert np.array_equal(found[0].double().numpy(), np.concatenate(blocks))
    assert torch.equal(found[0], found[1])
    if not signed:  # second moments divide
        large = values.abs() > 1e-20
        assert bool((found[0][large] > 0).all())


def slices_update(name: str, states: str | None, master: torch.dtype, cuts: list[int]) -> Tensor:
    """Parameters and states after three updates of slices between `cuts`, in one row."""
    numel, optimizer = 4 * 256, replace(OPTIMIZERS[name], weight_decay=0.5)
    generator = torch.Generator().manual_seed(0)
    noise = Noise(0, "x", [ParamSpec(name="w", shape=(16, 64))], [(0, 0)], numel)
    values = torch.randn(numel, generator=generator).to(master)
    gradients = [torch.randn(numel, generator=generator) for _ in range(3)]
    rows: list[list[Tensor]] = []
    for first, last in pairwise(cuts):
        gradient, storage = torch.zeros(last - first), Storage(torch.float32, states, noise)
        own = values[first:last].clone()
        made = make_optimizer(own, gradient, first, (), 704, optimizer, torch.float32, storage)
        for each in gradients:
            gradient.copy_(each[first:last])
            made.update(0.01)
        (part,) = made.parts
        rows.append([each.float() for each in part.values.values()])
    return torch.cat([torch.cat(state) for state in zip(*rows, strict=True)])


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("states", [None, "bf16", "int8"])
def test_slices_are_updated_as_the_whole(name: str, states: str | None, master: torch.dtype) -> None:
    whole = slices_update(name, states, master, [0, 1024])
    cuts = [0, 256, 768, 1024] if states == "int8" else [0, 64, 320, 960, 1024]
    # torch's AdamW rounds elements that do not fill a vector in another way.
    cuts = cuts if name == "adamw" or states == "int8" else [0, 1, 333, 1000, 1024]
    assert torch.equal(slices_update(name, states, master, cuts), whole)


def test_parameters_in_bf16_follow_updates_below_their_rounding_step() -> None:
    """One that is rounded to the nearest stands still; the mean of those that are rounded stochastically does not."""
    numel, lr = 1 << 14, 1e-4
    noise = Noise(0, "x", [ParamSpec(name="w", shape=(numel,))], [(0,)], numel)
    values = torch.ones(numel, dtype=torch.bfloat16)
    made = ShardedAdamW(
        values,
        torch.ones(numel),
        0,
        OptimizerConfig(),
        storage=Storage(torch.float32, None, noise),
    )
    exactly = torch.ones(1)
    for _ in range(40):
        made.update(lr)
        exactly -= lr
    assert (torch.ones(1).bfloat16() - lr).bfloat16() == 1  # what the nearest would be
    # A step between neighbours is 2^-8 below 1: 40 draws of variance lr (2^-8 - lr) each.
    deviation = (40 * lr * 2**-8 / numel) ** 0.5
    assert float(values.float().mean()) == pytest.approx(float(exactly), abs=5 * deviation)
    again = ShardedAdamW(
        torch.ones(numel, dtype=torch.bfloat16),
        torch.ones(numel),
        0,
        OptimizerConfig(),
        storage=Storage(torch.float32, None, noise),
    )
    for _ in range(40):
        again.update(lr)
    assert torch.equal(again.master, values)


def states_of(world: World, sizes: Sizes, plan: Plan, model: str, optimizer: OptimizerConfig) -> tuple[Any, ...]:
    """Losses of two steps, all own parameters, and the meter's peaks."""
    built = MODELS[model]
    engine = Engine(
        Blocks(built.blocks(torch.float64)),
        Workload(cluster=cluster_of(*sizes), plan=replace(plan, update=optimizer.update), num_micros=1),
        built.objective,
        Training(optimizer=optimizer),
        RankSetup(rank=world.rank),
    )
    losses = []
    for step in range(3):
        tokens, labels = make_batch(step, world.world_size)
        losses.append(engine.step([Batch(tokens[world.rank :][:1], labels[world.rank :][:1])], 1e-3).loss)
    engine.check_bytes()
    engine.state.gather(engine.comm.collectives)
    values = torch.cat(
        [p.detach().flatten().float() for index in range(4) for _, p in sorted_parameters(engine, index)]
    )
    peak = dict(engine.report({}).memory_bytes)
    engine.close()
    return losses, values, peak


def sorted_parameters(engine: Engine, block: int) -> list[tuple[str, Tensor]]:
    return sorted(engine.state.named_parameters(block), key=lambda named: named[0])


STORED = [("fp32", "bf16"), ("fp32", "int8"), ("bf16", None), ("bf16", "bf16"), ("bf16", "int8")]


@pytest.mark.parametrize(("name", "stored"), in_turns(7, ["adamw", "lion", "muon"], STORED), ids=str)
def test_bytes_are_what_the_formulas_say(pool: LocalPool, name: str, stored: tuple[Any, Any]) -> None:
    master, states = stored
    cluster, optimizer, blocks = cluster_of(2, 2), OPTIMIZERS[name], MODELS["llama tied"].declared
    values = list[Tensor]()
    for placement in ("ddp", "zero1", "zero3"):
        plan = exact(placement, cluster, update=optimizer.update)
        plan = replace(plan, compute="bf16", master=master, optimizer_states=states)
        said = model_state_bytes(cluster, plan, build(cluster, plan, blocks, 1).blocks, 1)
        program = build(cluster, plan, blocks, 1)
        assert program.state_bytes == said
        kinds = Kinds.of(blocks)
        closed = model_states(cluster, plan, kinds, stage_blocks(kinds, range(len(blocks))), 1)
        assert closed.steady["optimizer"] == said["optimizer"]
        found = pool.run(4, states_of, (2, 2), plan, "llama tied", optimizer, timeout_s=60.0)
        assert max(each[2]["optimizer"] for each in found) == said["optimizer"]
        assert max(each[2]["grads"] for each in found) == said["grads"]
        values.append(found[0][1])
        assert all(torch.equal(each[1], values[-1]) for each in found)
    if states != "int8" and name != "muon":  # gradients are summed in another order, and few bits of any differ
        for other in values[1:]:
            assert float((other == values[0]).float().mean()) > 0.98


def test_formulas_of_a_state() -> None:
    assert [state_bytes("int8", numel) for numel in (0, 1, 256, 257, 512)] == [0, 9, 264, 269, 524]
    assert state_bytes("bf16", 100) == 200
    assert state_bytes("fp32", 100) == 400


def test_states_that_can_have_no_effect_are_refused() -> None:
    cluster, blocks = cluster_of(2), MODELS["llama tied"].declared
    plan = exact("zero1", cluster, update="sgd", optimizer_states="int8")
    with pytest.raises(PlanError, match="optimizer_states = 'int8' has no effect: optimizer 'sgd' keeps no state"):
        validate(cluster, plan, blocks)
    narrow = replace(exact("zero1", cluster), compute="fp32", master="bf16")
    with pytest.raises(PlanError, match="compute = 'fp32' is wider than master = 'bf16': use master = 'fp32'"):
        validate(cluster, narrow, blocks)
