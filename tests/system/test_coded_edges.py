"""Activations and gradients in block formats between stages: the numbers of one process that rounds them where the
stages meet, and nowhere else; their bytes, and the error that is measured.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.plan import Plan
from terrace.plan.wire import MessageClass, parse_format
from terrace.runtime.engine import Engine
from tests.support.coded_edges import Formats, coded_serial
from tests.support.nightly import nightly
from tests.support.parity import TOLERANCE, Case, Outcome, data_rows, deviation, engine_of, run
from tests.support.pipelines import Place, pipelined
from tests.support.toys import SEQUENCE, cluster_of

pytestmark = pytest.mark.timeout(360)

ONWARD, BACK = "int8:16", "int4:16"
WIRE = {"pipeline": {"node": ONWARD}, "pipeline_backward": {"node": BACK}}
FED_BACK = WIRE | {"pipeline_backward": {"node": "int4:16+feedback"}}
TWO = Place((2, 2), {"node": {"pipeline": 2}}, 2)
FOUR = Place((2, 2), {"package": {"pipeline": 2}, "node": {"pipeline": 2}}, 4)  # stages 0, 1 and 2, 3 share a node
ROWS = Place((2, 2), {"package": {"tensor": 2}, "node": {"pipeline": 2}}, 2)
HIDDEN = 8  # of the deep models


def boundaries(place: Place, schedule: str, cut: Sequence[int], formats: Formats) -> dict[int, Formats]:
    """The block before each boundary on tier "node", by hand."""
    num, found, block = place.num_stages, {}, -1
    order = list(range(num)) if schedule != "zbv" else [*range(num), *reversed(range(num))]
    for virtual, size in enumerate(cut[:-1]):
        block += size
        one, other = order[virtual % len(order)], order[(virtual + 1) % len(order)]
        nodes = (one, other) if num == 2 else (one // 2, other // 2)
        if nodes[0] != nodes[1]:
            found[block] = formats
    return found


# Place, schedule, blocks of each virtual stage, further changes of the plan.
CASES: list[tuple[Place, str, tuple[int, ...], dict[str, Any]]] = [
    (TWO, "1f1b", (3, 5), {"recompute": ("*",)}),
    (TWO, "zb-h1", (5, 3), {"unit": 2, "micro_batch": 2, "wire": FED_BACK}),
    (FOUR, "interleaved:2", (1,) * 8, {"wire": FED_BACK}),
    (FOUR, "zb-h2", (2, 2, 2, 2), {"recompute": ("block.[0246]",), "wire": FED_BACK}),
    (FOUR, "zbv", (1,) * 8, {}),
    (ROWS, "1f1b", (4, 4), {"sequence_parallel": False}),
    (ROWS, "zb-h1", (4, 4), {"wire": FED_BACK}),
]
FURTHER: list[tuple[Place, str, tuple[int, ...], dict[str, Any]]] = [
    (TWO, "interleaved:2", (2, 2, 2, 2), {"recompute": ("*",)}),
    (TWO, "zeropp:2", (1, 3, 2, 2), {"unit": 2}),
    (FOUR, "gpipe", (2, 2, 2, 2), {}),
    (FOUR, "zb-auto:3", (2, 2, 2, 2), {}),
    (FOUR, "breadth-first:2", (1,) * 8, {"unit": 4}),
]


def _name(row: tuple[Place, str, tuple[int, ...], dict[str, Any]]) -> str:
    return f"{row[0].num_stages} {row[1]} {row[3]}"


def plan_of(place: Place, schedule: str, cut: tuple[int, ...], **changes: Any) -> Plan:
    changes = {"wire": WIRE, **changes}
    name = "ddp" if place is FOUR else "zero2"
    plan = pipelined(name, place, schedule, stages=cut, **{key: each for key, each in changes.items() if key != "wire"})
    return Plan(**{**vars(plan), "wire": changes["wire"]})


def both(pool: LocalPool, row: tuple[Place, str, tuple[int, ...], dict[str, Any]], **more: Any) -> dict[str, float]:
    """How far a run is from one process; its bytes are the formula's."""
    place, schedule, cut, changes = row
    steps = 3 if "feedback" in str(changes) else 2  # a residual is of two steps when it is sent
    case = Case(plan_of(place, schedule, cut, **changes), 4, "deep llama tied", num_steps=steps, **more)
    wire = case.plan.wire
    formats = Formats(wire.get("pipeline", {}).get("node", ""), wire.get("pipeline_backward", {}).get("node", ""))
    (outcomes,) = run(pool, cluster_of(*place.sizes), [case])
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
    data, rows = {id(TWO): (2, 1), id(FOUR): (1, 1), id(ROWS): (1, 2)}[id(place)]
    return deviation(outcomes, coded_serial(case, boundaries(place, schedule, cut, formats), data, rows))


@pytest.mark.parametrize(
    "row", [CASES[3], CASES[6], *nightly(*((row,) for row in (*CASES[:3], *CASES[4:6], *FURTHER)))], ids=_name
)
def test_a_run_is_one_process_that_rounds_where_stages_meet(
    pool: LocalPool, row: tuple[Place, str, tuple[int, ...], dict[str, Any]]
) -> None:
    found = both(pool, row)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.parametrize(
    "wire",
    [
        {"pipeline_backward": {"node": "topk+feedback"}},
        *nightly({"pipeline": {"node": "fp8:16"}}, {"pipeline_backward": {"node": "int8:16"}}),
    ],
    ids=str,
)
def test_one_direction_alone(pool: LocalPool, wire: dict[str, dict[str, str]]) -> None:
    found = both(pool, (FOUR, "1f1b", (2, 2, 2, 2), {"wire": wire}))
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.nightly
def test_comparison_sees_rounding_on_a_tier_that_has_no_format(pool: LocalPool) -> None:
    found = both(pool, CASES[2], sabotage="rounded_on_a_plain_tier")
    assert all(each > 100 * TOLERANCE for each in found.values()), found


def test_comparison_sees_a_residual_that_is_lost(pool: LocalPool) -> None:
    found = both(pool, CASES[3], sabotage="lost_residual")
    assert found["loss"] > 100 * TOLERANCE < found["parameters"], found


def figures(world: World, cluster: Cluster, case: Case) -> tuple[dict[str, float], dict[tuple[str, str], int]]:
    """Errors of the last step, and bytes of all steps, as this rank's ledger has them."""
    engine = engine_of(world, cluster, case)
    for step in range(case.num_steps):
        result = engine.step(data_rows(engine, case, step), 1e-3)
    engine.check_bytes()
    engine.close()
    sent = {(str(message), tier): num for (message, tier), num in engine.comm.ledger.total().items()}
    return result.quantisation_error, sent


def test_bytes_and_errors_of_the_boundary_that_is_coded(pool: LocalPool) -> None:
    case = Case(plan_of(FOUR, "1f1b", (2, 2, 2, 2)), num_micros=4, model="deep llama tied")
    cluster, numel, passes = cluster_of(*FOUR.sizes), SEQUENCE * HIDDEN, 4 * case.num_steps
    # 48 elements: 3 scales, then 48 bytes of int8 or 24 of int4, up to a multiple of 16.
    onward, back, plain = passes * 64, passes * 32, passes * numel * 8
    everyone = pool.run(4, figures, cluster, case, timeout_s=120.0)
    wanted = [
        {("pipeline", "package"): plain},
        {("pipeline_backward", "package"): plain, ("pipeline", "node"): onward},
        {("pipeline", "package"): plain, ("pipeline_backward", "node"): back},
        {("pipeline_backward", "package"): plain},
    ]
    for (errors, sent), row in zip(everyone, wanted, strict=True):
        assert {key: num for key, num in sent.items() if key[0].startswith("pipeline")} == row
        assert errors == everyone[0][0]
        assert 0.001 < errors["pipeline"] < 0.01 < errors["pipeline_backward"] < 0.15
    assert parse_format(ONWARD).message_bytes(numel) == 64
    assert {MessageClass.PIPELINE.value, MessageClass.PIPELINE_BACKWARD.value} == {*WIRE}


def goes_on(world: World, cluster: Cluster, case: Case, folder: Path) -> list[str]:
    """Differences between a run that is stopped after two steps, resumed and stopped again, and one that is not."""
    straight, other = engine_of(world, cluster, case), engine_of(world, cluster, case)

    def step(engine: Engine, number: int) -> tuple[float, float]:
        result = engine.step(data_rows(engine, case, number), 3e-3)
        return result.loss, result.grad_norm

    before = [step(straight, number) for number in range(2)]
    notes = [resume(other, Checkpoint(save(straight, folder, 2, {}, keep=1)))]
    wanted, found = ([step(engine, number) for number in (2, 3)] for engine in (straight, other))
    complaints = [note for note in notes if note]
    complaints += [] if len(before) == len(wanted) and wanted == found else [f"{found} is not {wanted}"]
    kept = {block: origin.residuals for block, origin in other.state.edges.items() if origin.residuals}
    expected = [4] if world.rank >= 2 else []  # of the second stage's first block
    complaints += [] if [*kept] == expected else [f"residuals of {[*kept]}"]
    measured = other.comm.meter.peak()["feedback"]
    complaints += [] if measured == other.program.state_bytes["feedback"] else [f"{measured} bytes of feedback"]
    for engine in (straight, other):
        engine.close()
    return complaints


def test_a_resumed_run_has_the_residuals_of_its_gradients_and_the_formula_their_memory(
    pool: LocalPool, tmp_path: Path
) -> None:
    case = Case(plan_of(TWO, "1f1b", (4, 4), wire=FED_BACK), num_micros=4, model="deep llama tied")
    assert pool.run(4, goes_on, cluster_of(*TWO.sizes), case, tmp_path, timeout_s=120.0) == [[]] * 4


def test_a_dtype_narrower_than_computing(pool: LocalPool) -> None:
    """bf16 between stages of an fp64 model: halfway to int8, and near the exact run."""
    wire = {"pipeline": {"node": "bf16"}, "pipeline_backward": {"node": "bf16"}}
    case = Case(plan_of(TWO, "1f1b", (3, 5), wire=wire), num_micros=4, model="deep llama tied")
    (outcomes,) = run(pool, cluster_of(*TWO.sizes), [case])
    assert not outcomes[0].complaint
    exact: Outcome = coded_serial(case, {}, 2)
    assert 1e-6 < deviation(outcomes, exact)["loss"] < 2e-2
