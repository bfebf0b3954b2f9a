"""The context axis: the same numbers as one process, and the bytes that it declares."""

from typing import Any

import pytest

from terrace.cluster import Cluster
from terrace.plan import Layout, Plan
from terrace.runtime.launch import LocalPool
from tests.parity import deviation, exact
from tests.spreads import Rows, SpreadCase, in_one_process, train_spread
from tests.toys import cluster_of

TOLERANCE = 1e-10

pytestmark = pytest.mark.timeout(360)

# Documents longer than what a rank holds, of one token, and short neighbours; rows that neither 2 r nor u divides;
# fewer tokens than ranks.
DOCUMENTS = ((5, 1, 17), (23,), (4, 4, 4, 11))
ROWS = (
    Rows(model="wide llama, 1 kv head", sequence=23, documents=DOCUMENTS),
    Rows(model="wide llama, 2 kv heads", sequence=37),
    Rows(model="wide llama, 8 kv heads", sequence=5),
    Rows(model="wide llama, window", sequence=23, documents=DOCUMENTS),
    Rows(model="wide gpt2", sequence=7),
    Rows(model="wide qwen3, 2 kv heads", sequence=16),
)


def context(cluster: Cluster, mapping: dict[str, Any], name: str = "zero3", **changes: object) -> Plan:
    return exact(name, cluster, mapping=mapping, **changes)


def forms(ulysses: int, ring: int) -> dict[str, Any]:
    return {"context": {"ulysses": ulysses, "ring": ring}}


def run(pool: LocalPool, cluster: Cluster, cases: list[SpreadCase]) -> list[tuple[dict[str, float], str]]:
    """Return of every case how far it is from one process, and what the ledger complains of."""
    by_rank = pool.run(cluster.world_size, train_spread, cluster, cases, timeout_s=300.0)
    found = []
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        num_rows = Layout.of(cluster, case.plan).data_degree * case.num_micros * case.plan.micro_batch
        complaints = "; ".join(outcome.complaint for outcome in outcomes if outcome.complaint)
        found.append((deviation(list(outcomes), in_one_process(case.rows, num_rows)), complaints))
    return found


def check(pool: LocalPool, cluster: Cluster, cases: list[SpreadCase]) -> None:
    for case, (distance, complaint) in zip(cases, run(pool, cluster, cases), strict=True):
        assert max(distance.values()) < TOLERANCE, (case, distance)
        assert not complaint, (case, complaint)


@pytest.mark.parametrize("size", [2, 4, 8])
def test_every_form_equals_one_process(pool: LocalPool, size: int) -> None:
    """Every form with two kinds of rows, one of them of two sequences a micro-batch; every kind comes up."""
    cluster, cases = cluster_of(size), []
    degrees = [degree for degree in (1, 2, 4, 8) if degree <= size]
    for index, ulysses in enumerate(degrees, start=size):
        for more in (0, 1):
            plan = context(cluster, {"package": forms(ulysses, size // ulysses)}, micro_batch=1 + more)
            cases.append(SpreadCase(plan=plan, rows=ROWS[(2 * index + more) % len(ROWS)]))
    check(pool, cluster, cases)


MAPPINGS: list[dict[str, Any]] = [
    {"package": forms(2, 1), "node": forms(1, 2)},
    {"package": forms(1, 2), "node": forms(1, 2), "system": forms(2, 1)},
    {"node": forms(1, 2), "system": forms(1, 2)},
    {"package": {"context": 2}, "system": forms(2, 1)},
]


def test_rings_over_tiers_beside_every_placement(pool: LocalPool) -> None:
    """With data ranks, several micro-batches, recomputation and frozen layers."""
    cluster, cases = cluster_of(2, 2, 2), []
    for index, (mapping, name) in enumerate(zip(MAPPINGS, ("three-level", "zero++", "zero2", "zero3"), strict=True)):
        again = ("layers.*",) if index % 2 else ()
        rows = ROWS[index] if index < 3 else Rows(model="llama, frozen layer", sequence=9)
        plan = context(cluster, mapping, name, recompute=again)
        cases.append(SpreadCase(plan=plan, rows=rows, num_micros=2, lane=("lazy", "thread")[index % 2]))
    check(pool, cluster, cases)


def test_a_fault_shows(pool: LocalPool) -> None:
    cluster = cluster_of(2)
    plan = context(cluster, {"package": forms(1, 2)})
    cases = [SpreadCase(plan=plan, rows=ROWS[1], sabotage=fault) for fault in ("wrong_position", "dropped_pair")]
    for distance, complaint in run(pool, cluster, cases):
        assert min(distance.values()) > 1e-4, distance
        assert not complaint
