"""Islands on ranks against a simulation of them in one process, which shares no code with the runtime."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from terrace.base.schema import load
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.model.decoder import IGNORE_INDEX
from terrace.plan.layout import Layout
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.runtime.islands import DivergedError
from terrace.runtime.settings import OptimizerConfig
from tests.support.nightly import nightly
from tests.support.outer_cases import FAULTS, as_it_arrives, check, compare, islands_of, trained
from tests.support.outer_exchanges import Whole
from tests.support.parity import TOLERANCE, Case, engine_of, exact, flatten, trainable
from tests.support.pipelines import INNER, pipelined
from tests.support.toys import MODELS, cluster_of, count_tokens, run_blocks

DEEP = "deep llama tied"


def island_plan(name: str, outer: Outer, **changes: object) -> Plan:
    """A preset in fp64 on two tiers of two, whose states lie inside the islands of `outer`."""
    made = exact(name, cluster_of(2, 2), outer=outer, **changes)
    inside = {"node": "package", "package": "device"}[outer.tier]
    kept = {state: inside for state in ("params", "grads", "optimizer") if getattr(made, state) != "device"}
    return replace(made, **kept)  # type: ignore[arg-type]


def some(names: Iterable[str], *first: str) -> list[Any]:
    """These names for every run of the tests, the others nightly."""
    assert set(first) <= set(names)
    return [*first, *nightly(*(name for name in names if name not in first))]


LOOPS = {
    "average": Outer(tier="node", every=3, optimizer="average"),
    "nesterov": Outer(tier="node", every=3),
    "momentum, clipped": Outer(tier="node", every=3, optimizer="momentum", momentum=0.5, clip=0.01),
    "in turns": Outer(tier="node", every=3, fragments=3),
    "late": Outer(tier="node", every=3, delay=1),
    "late in turns": Outer(tier="node", every=6, fragments=3, delay=3, keep=0.5),
    "a cycle late": Outer(tier="node", every=3, delay=3),
    "CO2": Outer(tier="node", every=3, delay=3, optimizer="momentum", keep=0.0, penalty=True, clip=0.02),
    "a cycle late in turns": Outer(tier="node", every=3, fragments=3, delay=3, keep=0.5, penalty=True),
    "every step late": Outer(tier="node", every=1, delay=1, optimizer="average"),
}


def case_of(outer: Outer, name: str = "zero3", **changes: object) -> Case:
    more = {key: changes.pop(key) for key in ("model", "optimizer", "num_steps", "num_micros") if key in changes}
    steps = {"num_steps": 3 * outer.every + 1, "num_micros": 2} | more
    return Case(island_plan(name, outer, **changes), **steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", some(LOOPS, "nesterov", "late in turns", "CO2", "every step late"))
def test_a_loop_equals_its_simulation(pool: LocalPool, name: str) -> None:
    outer, cluster = LOOPS[name], cluster_of(2, 2)
    (outcomes,) = check(pool, cluster, [case_of(outer)])
    for found in outcomes:
        assert found.held > 0
        # The cycle sends each fragment once, and a run of three cycles and a step four times.
        assert found.outer_bytes["node"] == 4 * found.cycle_bytes["node"] > 0


SYNCHRONOUS = OptimizerConfig(name="sgd", lr=0.05, clip=0.0, weight_decay=0.0)
ONE_STEP = Outer(tier="node", every=1, optimizer="average")
INSIDE = {
    "replicated": case_of(ONE_STEP, "ddp", optimizer=SYNCHRONOUS),
    "optimizer sharded": case_of(ONE_STEP, "zero1", optimizer=SYNCHRONOUS),
    "gradients sharded": case_of(ONE_STEP, "zero2", optimizer=SYNCHRONOUS),
    "all sharded": case_of(ONE_STEP, "zero3", optimizer=SYNCHRONOUS),
    "every rank an island": case_of(replace(ONE_STEP, tier="package"), "ddp", optimizer=SYNCHRONOUS),
}


@pytest.mark.parametrize("name", some(INSIDE, "optimizer sharded", "every rank an island"))
def test_islands_of_sgd_that_average_every_step_are_synchronous(pool: LocalPool, name: str) -> None:
    """Also of uneven valid tokens; the reference is one model on all rows."""
    case, cluster = replace(INSIDE[name], num_steps=5), cluster_of(2, 2)
    outcomes = pool.run(cluster.world_size, trained, cluster, case, timeout_s=120.0)
    losses, parameters = one_model(case, cluster)
    layout = Layout.of(cluster, case.plan)
    tokens = [valid_tokens(case, cluster, step) for step in range(case.num_steps)]
    assert any(len(set(counts)) > 1 for counts in tokens)
    for outcome in outcomes:
        assert outcome.parameters.sub(parameters).abs().max() < TOLERANCE
        assert [loss for _, _, loss in outcome.applied] == pytest.approx(losses, rel=1e-10)
        assert len(outcome.applied) == 5
    assert layout.num_islands == (4 if name == "every rank an island" else 2)


def one_model(case: Case, cluster: Cluster) -> tuple[list[float], Tensor]:
    """Losses of plain gradient descent on all rows in this process, and parameters after it."""
    model, losses = MODELS[case.model], list[float]()
    blocks = model.blocks(torch.float64)
    for step in range(case.num_steps):
        batch = case.rows.batch(step, sum(map(len, islands_of(case, cluster))))
        loss = model.objective(run_blocks(blocks, batch.inputs), batch.labels) / count_tokens(batch.labels)
        parameters = trainable(blocks)
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.data -= case.optimizer.lr * gradient
        losses.append(float(loss.detach()))
    return losses, flatten(blocks)


def valid_tokens(case: Case, cluster: Cluster, step: int) -> list[int]:
    """Valid tokens of each island."""
    rows_of = islands_of(case, cluster)
    labels = case.rows.batch(step, sum(map(len, rows_of))).labels
    return [int((labels[list(rows)] != IGNORE_INDEX).sum()) for rows in rows_of]


LION, MUON = OptimizerConfig(name="lion", lr=3e-4), OptimizerConfig(name="muon", lr=3e-3)
TURNS = Outer(tier="node", every=3, fragments=3, delay=1, keep=0.5)
AXES = {
    "tensor inside": case_of(LOOPS["late in turns"], "ddp", mapping={"package": {"tensor": 2}}, model=DEEP),
    "pipeline inside": Case(
        replace(pipelined("ddp", INNER, "1f1b"), outer=LOOPS["a cycle late in turns"]),
        num_micros=3,
        model=DEEP,
        num_steps=8,
    ),
    "context inside": case_of(TURNS, "zero3", mapping={"package": {"context": 2}}, model=DEEP),
    "tied and frozen": case_of(replace(TURNS, fragments=1), model="llama, frozen layer"),
    "lion": case_of(TURNS, optimizer=LION),
    "muon": case_of(TURNS, optimizer=MUON, model=DEEP),
    "every rank an island": case_of(replace(TURNS, tier="package"), "ddp"),
}


@pytest.mark.parametrize("name", some(AXES, "lion"))
def test_islands_of_other_axes_and_optimizers_equal_their_simulation(pool: LocalPool, name: str) -> None:
    check(pool, cluster_of(2, 2), [AXES[name]])


ALL_RULES = Outer(
    tier="node", every=3, fragments=3, delay=3, optimizer="momentum", lr=0.8, momentum=0.5, keep=0.5, penalty=True,
    clip=0.002,
)  # fmt: skip


@pytest.mark.parametrize("fault", some(FAULTS, "no penalty"))
def test_a_rule_that_is_broken_is_noticed(pool: LocalPool, fault: str) -> None:
    with pytest.raises(AssertionError):
        check(pool, cluster_of(2, 2), [replace(case_of(ALL_RULES), sabotage=fault)])


@pytest.mark.parametrize("wire", ["topk+feedback", *nightly("int4+feedback", "int8")])
def test_coded_changes_equal_a_simulation_that_codes_them(pool: LocalPool, wire: str) -> None:
    cluster = cluster_of(2, 2)
    base = case_of(TURNS)
    case = replace(base, plan=replace(base.plan, wire={"outer": {"node": wire}}))
    code = wire.partition("+")[0]
    coded = Whole(as_it_arrives(code), ranks_inside=2, feedback=wire.endswith("feedback"))
    (outcomes,) = check(pool, cluster, [case], exchange=coded)
    # The same without what rounding left over is noticed.
    if wire.endswith("feedback"):
        forgets = Whole(as_it_arrives(code), ranks_inside=2)
        with pytest.raises(AssertionError):
            compare(case, cluster, outcomes, exchange=forgets)


def any_loop(number: int) -> tuple[Outer, OptimizerConfig]:
    """A loop and an inner optimizer, drawn by its number."""
    draw = random.Random(number)
    table: dict[str, Any] = {"tier": "node", "every": draw.choice((1, 3, 9))}
    table |= {"optimizer": draw.choice(("nesterov", "momentum", "average"))}
    table |= {"delay": draw.choice((0, 1, table["every"]))}
    table |= {"fragments": draw.choice((1, 3))} if table["every"] > 1 else {}
    if table["delay"]:
        table |= {"keep": draw.choice((0.0, 0.5, 1.0)), "penalty": draw.random() < 0.5}
    if table["optimizer"] != "average" and draw.random() < 0.5:
        table |= {"clip": 0.01}
    optimizer = draw.choice((OptimizerConfig(lr=3e-3), LION, MUON, SYNCHRONOUS))
    return load(Outer, table, "outer"), optimizer


@pytest.mark.nightly
@pytest.mark.parametrize("number", range(36))
def test_any_loop_equals_its_simulation(pool: LocalPool, number: int) -> None:
    outer, optimizer = any_loop(number)
    name = ("ddp", "zero1", "zero2", "zero3")[number % 4]
    check(pool, cluster_of(2, 2), [case_of(outer, name, optimizer=optimizer)])


def damaged(world: World, cluster: Cluster, case: Case) -> str:
    """The last bit of one element of an anchor flips on rank 3, of island 1, behind the second step."""
    engine = engine_of(world, cluster, case)
    for step in range(2):
        engine.step(case.batches(engine, case, step), case.optimizer.lr)
    if world.rank == 3:
        (flat,) = engine.state.trainable(2)
        flat.outer_state.anchor.view(torch.int64)[-1] ^= 1
    said = ""
    try:
        for step in range(2, 9):
            engine.step(case.batches(engine, case, step), case.optimizer.lr)
    except DivergedError as error:
        said = str(error)
    engine.close()
    return said


@pytest.mark.parametrize("name", ["late in turns", *nightly("average")])
def test_an_island_with_another_anchor_is_named(pool: LocalPool, name: str) -> None:
    case, cluster = case_of(LOOPS[name]), cluster_of(2, 2)
    said = pool.run(cluster.world_size, damaged, cluster, case, timeout_s=120.0)
    assert len(set(said)) == 1
    assert said[0].startswith("block 'block.2' has other outer parameters on island 1 than on island 0")
