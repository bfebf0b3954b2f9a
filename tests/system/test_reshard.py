"""Parameters handed over among processes: every slice has the bits of the trained model, every byte is in the plan."""

from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
import torch

from terrace.base.errors import PlanError
from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool, World
from terrace.plan.handover import crossing
from terrace.plan.outer import Outer
from terrace.plan.plan import Plan
from terrace.plan.wire import FORMATS, MessageClass
from terrace.runtime.reshard import HandOver
from tests.support.nightly import nightly
from tests.support.parity import ADAMW, Case, engine_of, exact, wholes
from tests.support.pipelines import ALONE, OUTER, pipelined
from tests.support.toys import cluster_of

NUM_STEPS = 2  # the second hand-over finds what the first left
SIZES = (2, 2)
ROWS_INSIDE, ROWS_ON_BOTH = {"package": {"tensor": 2}}, {"package": {"tensor": 2}, "node": {"tensor": 2}}
WIDE = "wide llama, 2 kv heads"
THREE_LEVEL = replace(exact("three-level", cluster_of(*SIZES)), compute="fp32")
CASES = {
    "zero3": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model=WIDE)),
    "three levels, halves": (
        SIZES,
        Case(THREE_LEVEL, model=WIDE),
    ),
    "rows and shards": (SIZES, Case(exact("zero3", cluster_of(*SIZES), mapping=ROWS_INSIDE), model=WIDE)),
    "rows on both tiers": (SIZES, Case(exact("ddp", cluster_of(*SIZES), mapping=ROWS_ON_BOTH), model=WIDE)),
    "stages of shards": (SIZES, Case(pipelined("zero3", OUTER, "1f1b"), num_micros=3, model="deep llama tied")),
    "interleaved stages": ((4,), Case(pipelined("ddp", ALONE, "interleaved:2"), num_micros=4, model="deep gpt2")),
    "a frozen table": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model="llama, frozen table")),
    "experts": (SIZES, Case(exact("zero3", cluster_of(*SIZES)), model="wide experts")),
}


def handed_over(
    world: World, cluster: Cluster, case: Case, rows: int, source: Literal["params", "optimizer"] = "params"
) -> tuple[list[str], Counter[str], dict[str, int]]:
    """Parameters that are not the slice of the trained ones; bytes of hand-overs that this rank sent, that all send."""
    engine = engine_of(world, cluster, case)
    hand_over = HandOver(engine, rows, source=source)
    for step in range(NUM_STEPS):
        engine.step(case.batches(engine, case, step), ADAMW.lr)
        found = hand_over.run()
    engine.check_bytes()
    sent = Counter[str]()
    for (message, tier), num_bytes in engine.comm.ledger.total().items():
        sent[tier] += num_bytes if message is MessageClass.RESHARD else 0
    engine.state.gather(engine.comm.collectives)
    trained, wrong = wholes(engine), list[str]()
    transition = hand_over.transition
    for block, slices in enumerate(found):
        need = transition.needs(block)[world.rank]
        assert slices.keys() == need.keys()
        for name, (box,) in need.items():
            wanted = trained[block][name][tuple(slice(*side) for side in box)]
            if not torch.equal(slices[name].double(), wanted):
                wrong.append(f"{block}.{name}")
    engine.close()
    totals = [crossing(transition.cells[first], transition.tiers) for first in transition.alike]
    size = FORMATS[case.plan.compute].element_bytes * NUM_STEPS
    tiers = [tier.name for tier in cluster.tiers]
    return wrong, sent, {tier: sum(own) * size for tier, own in zip(tiers, zip(*totals, strict=True), strict=True)}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("zero3", 2),
        ("three levels, halves", 1),
        ("rows and shards", 2),
        ("rows on both tiers", 2),
        ("stages of shards", 1),
        *nightly(
            *(("zero3", rows) for rows in (1, 4)),
            ("three levels, halves", 2),
            *(("rows and shards", rows) for rows in (1, 4)),
            *(("rows on both tiers", rows) for rows in (1, 4)),
            *(("interleaved stages", rows) for rows in (1, 2)),
            *(("a frozen table", rows) for rows in (1, 2)),
            *(("experts", rows) for rows in (1, 2)),
        ),
    ],
)
def test_slices_have_the_bits_of_the_trained_model(pool: LocalPool, name: str, rows: int) -> None:
    sizes, case = CASES[name]
    cluster = cluster_of(*sizes)
    outcomes = pool.run(cluster.world_size, handed_over, cluster, case, rows, timeout_s=120.0)
    total = Counter[str]()
    for wrong, sent, _ in outcomes:
        assert not wrong
        total += sent
    for *_, declared in outcomes:
        assert total == Counter(declared)
    # With as many rows as in training, ranks have their slices.
    assert (sum(total.values()) == 0) == ((name, rows) == ("rows on both tiers", 4))


@pytest.mark.parametrize(
    ("name", "rows"),
    [("three levels, halves", 2), *nightly(("zero3", 1), ("stages of shards", 2), ("a frozen table", 2))],
)
def test_masters_have_the_bits_of_the_working_copies(pool: LocalPool, name: str, rows: int) -> None:
    """Of which ranks hold less here: halves are summed as fp32, and their masters are fp64."""
    sizes, case = CASES[name]
    cluster = cluster_of(*sizes)
    outcomes = pool.run(cluster.world_size, handed_over, cluster, case, rows, "optimizer", timeout_s=120.0)
    assert not any(wrong for wrong, *_ in outcomes)
    assert sum((sent for _, sent, _ in outcomes), Counter[str]()) == Counter(outcomes[0][2])


def refused(
    world: World, cluster: Cluster, case: Case, rows: int, source: Literal["params", "optimizer"] = "params"
) -> str:
    engine = engine_of(world, cluster, case)
    try:
        HandOver(engine, rows, source=source)
    except PlanError as error:
        return str(error)
    finally:
        engine.close()
    return "no error"


INSIDE = Plan(params="package", grads="package", optimizer="package", compute="fp64", master="fp64")
ISLANDS = replace(
    INSIDE,
    outer=Outer(tier="node", every=2),
)


@pytest.mark.parametrize(
    ("case", "rows", "said"),
    [
        (CASES["a frozen table"][1], 3, "tensor rows = 3 do not divide"),
        (Case(ISLANDS, model=WIDE), 4, "replicas of 4 tensor rows reach over islands of 2 ranks"),
        (Case(ISLANDS, model=WIDE), 2, "no error"),
    ],
)
def test_rows_that_nobody_can_have_are_refused(pool: LocalPool, case: Case, rows: int, said: str) -> None:
    cluster = cluster_of(*SIZES)
    found = pool.run(cluster.world_size, refused, cluster, case, rows, timeout_s=120.0)
    assert all(said in each for each in found), found


def test_masters_that_a_refresh_rounds_are_refused(pool: LocalPool) -> None:
    plan = replace(exact("zero2", cluster_of(*SIZES)), wire={"refresh": {"node": "fp32"}})
    case = Case(plan, model=WIDE)
    found = pool.run(4, refused, cluster_of(*SIZES), case, 2, "optimizer", timeout_s=120.0)
    assert all("refreshes travel as fp32 over node and parameters are fp64" in each for each in found), found
