"""Tables whose rows rest on a disk: the bits of rows on the device, bytes of the pages that ids touch, checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from terrace.checkpoint.reading import Checkpoint, resume
from terrace.checkpoint.writing import save
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.keep import Keep
from terrace.plan.wire import MessageClass
from terrace.runtime.finite import NonFiniteError
from terrace.runtime.settings import OptimizerConfig
from terrace.runtime.tracing import Tracer
from tests.support.checkpoints import contents, differing, make
from tests.support.kept import OPTIMIZERS, resumed
from tests.support.nightly import nightly
from tests.support.parity import Case, engine_of, exact
from tests.support.table_cases import DrawnRows, spread_over
from tests.support.toys import NUM_IDS, cluster_of

pytestmark = pytest.mark.timeout(300)

ON_DISK = Keep(table="disk", piece=64)  # an update in several parts
ALL_ON_DISK = replace(ON_DISK, optimizer="disk", params="disk", ring=3)
DENSE = replace(ALL_ON_DISK, table="device")  # the rows stay, the rest of the model does not
ON_CORES = Keep(optimizer="disk", update="host", table="disk", piece=64, ring=3)
SGD = OptimizerConfig(name="sgd", momentum=0.9, lr=0.1)
ROWS = MessageClass.ROW_READ, MessageClass.ROW_WRITE
MODEL, DEEP = "llama, many ids", "deep llama, many ids"


class Trained(NamedTuple):
    """Figures of each step and of an evaluation, all states, and the bytes of rows, read and written."""

    figures: list[float]
    states: dict[str, Tensor]
    moved: list[int]


def trained(world: World, cluster: Cluster, case: Case) -> Trained:
    """Train a case and evaluate it. Its ledger equals what programs and batches declare."""
    engine, figures = engine_of(world, cluster, case), list[float]()
    for step in range(case.num_steps):
        result = engine.step(case.batches(engine, case, step), case.optimizer.lr)
        figures += [result.loss, result.grad_norm]
    moved = [engine.comm.ledger.total().get((message, "disk"), 0) for message in ROWS]
    figures.append(engine.evaluate(case.batches(engine, case, 9)).loss)
    engine.check_bytes()
    states = {
        f"{flat.name} {number} {index}": state.tensor.clone()
        for number, flat in enumerate(engine.state)
        for index, state in enumerate(flat.optimizer.states)
    }
    engine.close()
    return Trained(figures, states, moved)


def case_of(name: str, sizes: tuple[int, ...], model: str = MODEL, **changes: Any) -> Case:
    cluster, more = cluster_of(*sizes), {"num_micros": 2, "num_steps": 3}
    more |= {key: changes.pop(key) for key in ("optimizer", "num_micros") if key in changes}
    plan = replace(exact(name, cluster), **{"vocabulary": spread_over(*sizes), **changes})
    return Case(plan, model=model, rows=DrawnRows(), **more)  # type: ignore[arg-type]


STAGES: Mapping[str, Any] = {"mapping": {"node": {"pipeline": 2}}, "vocabulary": {"package": 2}, "num_micros": 4}
CASES: dict[str, tuple[tuple[int, ...], Case, Keep]] = {
    "one rank": ((1,), case_of("ddp", (1,)), ON_DISK),
    "two ranks, all below": ((2,), case_of("zero3", (2,), optimizer=OPTIMIZERS["lion"]), ALL_ON_DISK),
    "the rest below": ((2,), case_of("zero3", (2,)), DENSE),
}
BY_NIGHT: dict[str, tuple[tuple[int, ...], Case, Keep]] = {
    "bf16, 1f1b": (
        (2, 2),
        case_of("zero1", (2, 2), DEEP, schedule="1f1b", compute="bf16", master="fp32", **STAGES),
        ON_DISK,
    ),
    "frozen": ((2,), case_of("ddp", (2,), "llama, many frozen ids", compute="fp32", master="fp32"), ON_DISK),
    "on the cores": ((2,), case_of("zero1", (2,)), ON_CORES),
    "sgd": ((2, 2), case_of("zero3", (2, 2), optimizer=SGD), ALL_ON_DISK),
    "without states": ((1,), case_of("ddp", (1,), optimizer=replace(SGD, momentum=0.0)), ON_DISK),
    "muon": ((2, 2), case_of("zero2", (2, 2), optimizer=OPTIMIZERS["muon"]), ALL_ON_DISK),
    "lsp": ((2,), case_of("zero2", (2,), optimizer=OPTIMIZERS["lsp"]), ON_DISK),
    "fp16": ((2,), case_of("zero1", (2,), compute="fp16", master="fp32"), ON_DISK),
    "zbv": ((2, 2), case_of("zero1", (2, 2), DEEP, schedule="zbv", **STAGES), ON_DISK),
    "the rest on the cores": ((2,), case_of("zero1", (2,)), replace(ON_CORES, table="device")),
    "in the backward": (
        (2,),
        case_of("zero3", (2,), optimizer=replace(OPTIMIZERS["adamw"], clip=0.0)),
        replace(ON_CORES, order="backward"),
    ),
}
ALL = CASES | BY_NIGHT


@pytest.mark.parametrize("name", [*CASES, *nightly(*BY_NIGHT)])
def test_rows_on_a_disk_change_no_bit(pool: LocalPool, name: str) -> None:
    sizes, case, keep = ALL[name]
    cluster = cluster_of(*sizes)
    below = replace(case, plan=replace(case.plan, keep=keep))
    before, after = (pool.run(cluster.world_size, trained, cluster, each, timeout_s=120.0) for each in (case, below))
    for one, other in zip(before, after, strict=True):
        assert other.figures == one.figures
        shared = one.states.keys() & other.states.keys()
        assert len(shared) >= len(one.states)
        assert all(torch.equal(one.states[key], other.states[key]) for key in shared)
        assert any(other.moved) == (keep.table_below and any(key.startswith("block.0") for key in other.states))


def drawn(world: World, case: Case) -> tuple[list[list[list[int]]], list[int]]:
    """The ids of each step and micro-batch, and the bytes of rows that the steps have moved."""
    engine, ids = engine_of(world, cluster_of(1), case), list[list[list[int]]]()
    for step in range(case.num_steps):
        batches = case.batches(engine, case, step)
        ids.append([batch.inputs.flatten().tolist() for batch in batches])
        engine.step(batches, case.optimizer.lr)
    engine.drain()
    moved = [engine.comm.ledger.total()[message, "disk"] for message in ROWS]
    engine.close()
    return ids, moved


def test_bytes_are_those_of_the_pages_that_ids_touch(pool: LocalPool) -> None:
    """By sets: a page of 21 rows (8 elements of 8 bytes, and two moments) is read once a step, and written once."""
    _, case, keep = ALL["one rank"]
    case = replace(case, plan=replace(case.plan, keep=keep), num_steps=4)
    ((ids, moved),) = pool.run(1, drawn, case, timeout_s=60.0)
    page_rows = (4096 - 64) // (3 * 8 * 8)
    assert NUM_IDS > page_rows == 21
    pages = [{each // page_rows for micro in step for each in micro} for step in ids]
    assert any(len(each) > 1 for each in pages)
    assert moved == [4096 * sum(map(len, pages))] * 2


def traced(world: World, case: Case) -> list[tuple[str, str]]:
    """Lane and category of each span of the second of two traced steps."""
    engine = engine_of(world, cluster_of(1), case)
    tracer = Tracer(engine)
    for step in range(2):
        with tracer.step():
            engine.step(case.batches(engine, case, step), case.optimizer.lr)
    engine.drain()
    recording = tracer.recordings()[-1]
    engine.close()
    return [(recording.lane_name(span.lane), span.category) for span in recording.spans[recording.first :]]


def test_a_traced_step_has_the_lane_of_the_rows(pool: LocalPool) -> None:
    _, case, keep = ALL["one rank"]
    (spans,) = pool.run(1, traced, replace(case, plan=replace(case.plan, keep=keep)), timeout_s=60.0)
    assert spans.count(("disk", "row_read")) in (1, 2)  # the second micro-batch may need no further page
    assert spans.count(("disk", "row_write")) == 1
    assert ("compute", "wait row_read") in spans


def test_a_run_goes_on_with_the_same_bits_with_and_without_rows_below(pool: LocalPool, tmp_path: Path) -> None:
    stored = {"vocabulary": {"package": 2}, "keep": ON_DISK}
    for losses, names in pool.run(2, resumed, tmp_path, stored, OPTIMIZERS["adamw"], "bf16", MODEL, timeout_s=120.0):
        assert names == [[], []]
        assert losses == [losses[0]] * 3
    assert pool.run(1, on_one_rank, tmp_path, timeout_s=60.0) == [[[], [], []]]


def on_one_rank(world: World, folder: Path) -> list[list[str]]:
    """How a checkpoint of two ranks differs from what one rank writes that has read it, under three plans."""
    (checkpoint,), found = (folder / "checkpoints").glob("step-*"), list[list[str]]()
    spread: Mapping[str, Any] = {"vocabulary": {"package": 1}}
    for number, stored in enumerate(({}, spread, {**spread, "keep": ON_DISK})):
        engine = make(world, (1,), "ddp", "bf16", 9, MODEL, stored=stored)
        resume(engine, Checkpoint(checkpoint))
        engine.drain()
        copy = folder / f"alone {number}"
        save(engine, copy, 2, {}, 2)
        found.append(differing(contents(checkpoint), contents(next((copy / "checkpoints").glob("step-*")))))
        engine.close()
    return found


def given_up(world: World, case: Case) -> tuple[list[float], list[int]]:
    """Losses of two steps behind one that is given up, and the bytes of rows that the latter has moved."""
    engine = engine_of(world, cluster_of(1), case)
    engine.step(case.batches(engine, case, 0), case.optimizer.lr)
    engine.drain()
    before = [engine.comm.ledger.total().get((message, "disk"), 0) for message in ROWS]
    poisoned = next(iter(engine.state.modules[1].parameters())).data
    values = poisoned.clone()
    poisoned.fill_(torch.nan)
    with pytest.raises(NonFiniteError):
        engine.step(case.batches(engine, case, 1), case.optimizer.lr)
    engine.drain()
    moved = [
        engine.comm.ledger.total().get((message, "disk"), 0) - had for message, had in zip(ROWS, before, strict=True)
    ]
    poisoned.copy_(values)
    losses = [engine.step(case.batches(engine, case, step), case.optimizer.lr).loss for step in (2, 3)]
    engine.check_bytes()
    engine.close()
    return losses, moved


def test_a_step_that_is_given_up_writes_no_page(pool: LocalPool) -> None:
    _, case, keep = ALL["one rank"]
    below = replace(case, plan=replace(case.plan, keep=keep))
    ((before, _),), ((after, moved),) = (pool.run(1, given_up, each, timeout_s=60.0) for each in (case, below))
    assert after == before
    assert moved[0] > 0
    assert moved[1] == 0
