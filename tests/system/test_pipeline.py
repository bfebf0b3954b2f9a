"""Pipelines that run: the numbers of one process, the order of the schedule, the bytes that are declared."""

import threading
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest

from terrace.cluster.cluster import Cluster
from terrace.comm.pace import pace_of
from terrace.launch.start import LocalPool, World
from terrace.plan.layout import Layout
from terrace.plan.stage import Pass
from terrace.plan.wire import MessageClass
from terrace.program.lowering import build_stages
from terrace.program.schedules.orders import StageTask
from terrace.program.stages import plan_orders
from tests.support.nightly import nightly
from tests.support.parity import TOLERANCE, Case, check, data_rows, deviation, engine_of, run, serial, train
from tests.support.pipelines import (
    ALONE,
    DIMENSIONS,
    OUTER,
    PLACEMENTS,
    SCHEDULES,
    Place,
    case_of,
    covering_rows,
    executed,
    num_chunks,
    pipelined,
    tasks_of,
)
from tests.support.toys import MODELS, SEQUENCE, Model, cluster_of

ROWS = covering_rows()

pytestmark = pytest.mark.timeout(360)


WORLD_SIZES = sorted({case_of(row)[0] for row in ROWS})


def in_default_suite(row: dict[str, Any]) -> bool:
    """Every schedule with one or two of the four placements, in turns; the others are run nightly."""
    return (SCHEDULES.index(row["schedule"]) + PLACEMENTS.index(row["placement"])) % 3 == 0


@pytest.mark.parametrize("sizes", WORLD_SIZES, ids=str)
@pytest.mark.parametrize("default", [True, *nightly(False)], ids=["in turns", "the rest"])
def test_every_schedule_and_placement_equals_one_process(
    pool: LocalPool, sizes: tuple[int, ...], default: bool
) -> None:
    rows = [row for row in ROWS if in_default_suite(row) == default]
    check(pool, cluster_of(*sizes), [case for where, case in map(case_of, rows) if where == sizes])


def test_an_order_by_hand_equals_one_process(pool: LocalPool) -> None:
    """Stages the other way round, one backward whole and one in two halves."""
    order = "csv:\n1F0,1F1,1B0,1I1,1W1\n0F0,0F1,0I0,0B1,0W0\n"
    case = Case(pipelined("zero2", OUTER, order, unit=2), num_micros=2, model="llama tied")
    check(pool, cluster_of(*OUTER.sizes), [case])


def test_the_default_suite_has_every_schedule_and_every_placement() -> None:
    rows = [row for row in ROWS if in_default_suite(row)]
    assert {row["schedule"] for row in rows} == {*SCHEDULES}
    assert {row["placement"] for row in rows} == {*PLACEMENTS}
    assert {case_of(row)[0] for row in rows} == {*WORLD_SIZES}


def test_all_pairs_are_among_the_cases() -> None:
    """But for a few that the number of cases has no room for."""
    assert [(row["schedule"], row["placement"]) for row in ROWS] == [(s, p) for s in SCHEDULES for p in PLACEMENTS]
    seen = {pair for row in ROWS for pair in combinations(((key, row[key]) for key in DIMENSIONS), 2)}
    for one, other in combinations(DIMENSIONS, 2):
        wanted = {((one, a), (other, b)) for a in DIMENSIONS[one] for b in DIMENSIONS[other]}
        assert len(wanted - seen) <= len(wanted) // 10, (one, other, wanted - seen)


TENSOR_OUTER = Place((2, 2), {"package": {"tensor": 2}, "node": {"pipeline": 2}}, 2)
TENSOR_INNER = Place((2, 2), {"package": {"pipeline": 2}, "node": {"tensor": 2}}, 2)
COLUMNS = Place((4,), {"package": {"tensor": {"columns": 2}, "pipeline": 2}}, 2)
THREE_AXES = Place((2, 2, 2), {"package": {"tensor": 2}, "system": {"pipeline": 2}}, 2)
SECONDARY = Place((2, 2, 2), {"node": {"pipeline": 2}}, 2)


@pytest.mark.parametrize("everyday", [True, *nightly(False)], ids=["in turns", "the rest"])
@pytest.mark.parametrize("place", [TENSOR_OUTER, *nightly((TENSOR_INNER,))], ids=str)
def test_tensor_ranks_send_parts_of_an_activation(pool: LocalPool, place: Place, everyday: bool) -> None:
    """Without sequence parallelism each rank sends a part, which the receivers gather; with it, its own tokens."""
    cases = []
    for index, (schedule, model) in enumerate((("1f1b", "gpt2"), ("zbv", "llama tied"), ("zeropp:2", "gpt_neox"))):
        splits = ((index + (place is TENSOR_INNER)) % 2 == 0) == everyday
        plan = pipelined("zero2", place, schedule, unit=2, sequence_parallel=splits)
        cases.append(Case(plan, num_micros=3, model=model))
    check(pool, cluster_of(*place.sizes), cases)


@pytest.mark.parametrize(
    ("schedule", "changes"), [("interleaved:2", {}), *nightly(("zb-h1", {"recompute": ("*",)}))], ids=str
)
def test_columns_and_their_stages(pool: LocalPool, schedule: str, changes: dict[str, Any]) -> None:
    plan = pipelined("ddp", COLUMNS, schedule, **changes)
    check(pool, cluster_of(*COLUMNS.sizes), [Case(plan, num_micros=4, model="llama tied")])


@pytest.mark.parametrize("changes", [{"recompute": ("*",)}, *nightly({"sequence_parallel": False, "unit": 3})], ids=str)
def test_three_axes(pool: LocalPool, changes: dict[str, Any]) -> None:
    plan = pipelined("three-level", THREE_AXES, "zb-h2", **changes)
    check(pool, cluster_of(*THREE_AXES.sizes), [Case(plan, num_micros=4, model="gpt2")])


@pytest.mark.parametrize(
    ("schedule", "unit", "prefetch"), [("zbv", 2, 1), *nightly(("1f1b", 1, 0), ("zeropp:2", 2, 2))]
)
def test_secondary_copies(pool: LocalPool, schedule: str, unit: int, prefetch: int) -> None:
    """Parameters over both tiers beside the pipeline's, a copy on the inner one."""
    cluster = cluster_of(*SECONDARY.sizes)
    plan = pipelined("zero++", SECONDARY, schedule, unit=unit, prefetch=prefetch)
    assert Layout.of(cluster, plan).has_secondary
    check(pool, cluster, [Case(plan, num_micros=3, model="llama tied")])


@pytest.mark.parametrize("everyday", [True, *nightly(False)], ids=["in turns", "the rest"])
def test_stages_without_a_layer(pool: LocalPool, everyday: bool) -> None:
    """The embedding alone on the first virtual stage, the head alone on the last, tied or not in turns."""
    splits = [
        ("1f1b", (1, 3)),
        ("1f1b", (3, 1)),
        ("zb-h1", (1, 3)),
        ("interleaved:2", (1, 1, 1, 1)),
        ("zbv", (1, 1, 1, 1)),
    ]
    cases = [
        Case(
            pipelined(("zero3", "ddp")[index % 2], OUTER, schedule, stages=stages),
            num_micros=4,
            model=("llama tied", "gpt_neox")[((index + 1) // 2 % 2 == 0) == everyday],
        )
        for index, (schedule, stages) in enumerate(splits)
    ]
    check(pool, cluster_of(*OUTER.sizes), cases[1:4:2] if everyday else cases)


def test_one_lane_a_rank_is_enough(pool: LocalPool) -> None:
    """As the verifier assumes, a rank does nothing while a collective of its own is under way."""
    plans = [pipelined(name, OUTER, schedule, unit=2) for name, schedule in (("zero3", "1f1b"), ("ddp", "zb-h2"))]
    check(
        pool, cluster_of(*OUTER.sizes), [Case(plan, num_micros=3, model="llama tied", lane="eager") for plan in plans]
    )


@pytest.mark.parametrize(
    ("fault", "schedule", "seen"),
    [
        ("skipped_weight_half", "zb-h1", ("norm", "parameters")),
        ("swapped_arrivals", "gpipe", ("loss", "norm", "parameters")),
    ],
)
def test_comparison_sees_a_fault(pool: LocalPool, fault: str, schedule: str, seen: tuple[str, ...]) -> None:
    case = Case(pipelined("zero2", OUTER, schedule), num_micros=3, model="llama tied", sabotage=fault)
    (outcomes,) = run(pool, cluster_of(*OUTER.sizes), [case])
    found = deviation(outcomes, serial(case.model, 6))
    assert all(found[quantity] > 100 * TOLERANCE for quantity in seen), found


def test_comparison_sees_copies_that_differ(pool: LocalPool) -> None:
    """Both stages that hold the table would train their own."""
    case = Case(pipelined("zero2", OUTER), num_micros=3, model="llama tied", sabotage="skipped_tie")
    with pytest.raises(RuntimeError, match=r"AssertionError: \('block.0', 'weight', 2\)"):
        pool.run(4, train, cluster_of(*OUTER.sizes), [case], timeout_s=60.0)


WHOLE, LATE = 34, 32  # M_B and M_W: of a micro-batch's activations, what waits for the weight half


def most_kept(tasks: Sequence[StageTask]) -> int:
    """The most activations kept at once by a stage that has run these tasks; a task frees when it ends."""
    freed = {Pass.FORWARD: -WHOLE, Pass.BACKWARD: WHOLE, Pass.BACKWARD_INPUT: WHOLE - LATE, Pass.BACKWARD_WEIGHT: LATE}
    kept = [-sum(freed[task.pass_] for task in tasks[: stop + 1]) for stop in range(len(tasks))]
    assert kept[-1] == 0
    return max(kept)


def published(schedule: str, stage: int, stages: int, micros: int, unit: int) -> int:
    """The most that a stage keeps of micro-batches, as published for each schedule."""
    behind, name, chunks = stages - stage, schedule.partition(":")[0], num_chunks(schedule)
    later = 2 * (stages - 1 - stage)
    return {
        "1f1b": min(micros, behind) * WHOLE,
        "gpipe": micros * WHOLE,
        "interleaved": min(chunks * micros, later + (chunks - 1) * stages + 1) * WHOLE,
        "zb-h1": behind * WHOLE + stage * LATE,
        "zb-h2": (2 * behind - 1) * WHOLE + 2 * stage * LATE,
        "zb-1p": stages * WHOLE,
        "zb-2p": 2 * stages * WHOLE,
        "zb-auto": 3 * WHOLE,
        "zbv": 2 * stages * WHOLE,
        "breadth-first": micros * chunks * WHOLE,
        "zeropp": unit * chunks * WHOLE + min(unit * chunks, later) * LATE,
    }[name]


MICROS, UNIT = 8, 2


def alone(schedule: str) -> Case:
    model = {1: "llama tied", 2: "deep llama tied"}[num_chunks(schedule)]
    return Case(pipelined("ddp", ALONE, schedule, unit=UNIT), num_micros=MICROS, model=model)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_programs_have_the_order_and_the_memory_of_the_schedule(schedule: str) -> None:
    """The number of micro-batches in flight is the published one."""
    case, cluster = alone(schedule), cluster_of(*ALONE.sizes)
    blocks = MODELS[case.model].declared
    orders = plan_orders(case.plan, blocks, 4, MICROS, SEQUENCE)
    for stage, program in enumerate(build_stages(cluster, case.plan, blocks, MICROS, SEQUENCE)):
        assert program.stage.index == stage
        tasks = tasks_of(program, list(program.instructions))
        assert tasks == list(orders.tasks[stage]), stage
        kept, most = most_kept(tasks), published(schedule, stage, 4, MICROS, UNIT)
        assert kept <= most, stage
        if schedule not in ("zb-1p", "zb-2p", "zb-auto:3"):  # whose memory is a limit
            assert kept == most, stage


@pytest.mark.parametrize("schedules", [SCHEDULES[::4], *nightly((SCHEDULES,))], ids=len)
def test_the_executed_order_is_that_of_the_program(pool: LocalPool, schedules: Sequence[str]) -> None:
    cases = [alone(schedule) for schedule in schedules]
    by_rank = pool.run(4, executed, cluster_of(*ALONE.sizes), cases, timeout_s=120.0)
    for ranks in zip(*by_rank, strict=True):
        for stage, (program, instructions) in enumerate(ranks):
            assert program.stage.index == stage
            assert instructions == list(program.instructions)


def kept_to_send(world: World, cluster: Cluster, case: Case, rate: float | None) -> tuple[int, int]:
    """The most messages that a rank keeps because they may not be received yet, and the threads of its lanes."""
    most = 0

    def note(*_: object) -> None:
        nonlocal most
        most = max(most, len(engine.runner.passes.step.activations._leaving))

    before = sum(thread.name == "terrace-lane" for thread in threading.enumerate())
    engine = engine_of(world, cluster, case, progress=note, pacer=pace_of(cluster, rate))
    engine.step(data_rows(engine, case, 0), 1e-3)
    engine.drain()
    num_threads = sum(thread.name == "terrace-lane" for thread in threading.enumerate()) - before
    engine.close()
    return most, num_threads


@pytest.mark.parametrize("rate", [1e9, *nightly(None)])
def test_what_was_sent_is_kept_until_it_is_received(pool: LocalPool, rate: float | None) -> None:
    """And no longer: of 32 micro-batches' activations a stage would keep every one that it has sent."""
    case = Case(pipelined("ddp", ALONE, "1f1b"), num_micros=32, model="llama tied")
    for stage, (most, num_threads) in enumerate(
        pool.run(4, kept_to_send, cluster_of(*ALONE.sizes), case, rate, timeout_s=60.0)
    ):
        assert 0 < most <= 16, stage
        assert num_threads <= 5, stage  # two lanes of collectives at most, and one for each stage that it sends to


def parameter_bytes(world: World, cluster: Cluster, cases: Sequence[Case], block: int) -> list[dict[str, int]]:
    """Bytes of one block's parameters and gradients that a rank sends in the second of two steps, by message class."""
    classes = (MessageClass.GATHER, MessageClass.GATHER_BACKWARD, MessageClass.REDUCE)
    found = []
    for case in cases:
        engine = engine_of(world, cluster, case)
        sent: dict[str, int] = {}
        if block in engine.program.stage.own:
            (flat,) = engine.state.flats[block]
            _measure(engine, flat, classes, sent)
        for step in range(2):
            sent.clear()
            engine.step(data_rows(engine, case, step), 1e-3)
        engine.check_bytes()
        found.append(dict(sent))
        engine.close()
    return found


def _measure(engine: Any, flat: Any, classes: Sequence[MessageClass], sent: dict[str, int]) -> None:
    """Record the ledger's counts while a message of a block is under way; its classes share one lane here."""

    def measured(work: Any) -> Any:
        def run(*words: Any) -> None:
            before = engine.comm.ledger.total()
            work(*words)
            for (message, _), total in engine.comm.ledger.total().items():
                if message in classes:
                    grown = total - before.get((message, "package"), 0)
                    sent[message.value] = sent.get(message.value, 0) + grown

        return run

    flat.gather, flat.gradient.reduce = measured(flat.gather), measured(flat.gradient.reduce)


def num_elements(model: Model, block: int) -> int:
    return sum(param.numel for param in model.declared[block].params)


@pytest.mark.parametrize("units", [(4,), *nightly(((1,),), ((2, 8),))], ids=str)
def test_a_layer_in_a_unit_is_gathered_twice_and_reduced_once(pool: LocalPool, units: tuple[int, ...]) -> None:
    """ZeroPP (2402.03791): 36 H^2 / U elements a micro-batch for a layer of 12 H^2, so 3 P / U for one of P.

    That is of a chunk in the middle: the first and the last of a stage stand beside themselves at the turns.
    """
    micros, block, cluster, model = 8, 3, cluster_of(*OUTER.sizes), "deep gpt2"
    cases = []
    for unit in units:
        plan = pipelined("zero3", OUTER, "zeropp:3", unit=unit, stages=(2, 1, 1, 1, 1, 2))
        cases.append(Case(plan, num_micros=micros, model=model))
    by_rank = pool.run(4, parameter_bytes, cluster, cases, block, timeout_s=120.0)
    whole = num_elements(MODELS[model], block)
    assert whole == 12 * 8**2 + 13 * 8, "12 H^2, biases and norms"
    for rank, found in enumerate(by_rank):
        for case, sent in zip(cases, found, strict=True):
            times = micros // case.plan.unit if rank < 2 else 0  # rank 2 and 3 have other blocks
            expected = dict.fromkeys(("gather", "gather_backward", "reduce"), times * whole * 8 // 2) if times else {}
            assert sent == expected, (rank, case.plan.unit)
            assert sum(sent.values()) == (3 * whole * micros // case.plan.unit * 8 // 2 if times else 0)
