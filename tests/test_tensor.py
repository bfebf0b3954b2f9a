"""The tensor axis: the same numbers as one process, and the bytes that its formula declares."""

from collections.abc import Iterator
from typing import Any

import pytest

from terrace.cluster import Cluster
from terrace.plan import Layout, Plan
from terrace.runtime.launch import LocalPool
from tests.parity import Case, Outcome, deviation, exact, serial, train
from tests.toys import cluster_of

TOLERANCE = 1e-10

pytestmark = pytest.mark.timeout(360)


@pytest.fixture(scope="module")
def pool() -> Iterator[LocalPool]:
    with LocalPool(8) as pool:
        yield pool


def tensor(cluster: Cluster, name: str, rows: dict[str, Any], **changes: object) -> Plan:
    return exact(name, cluster, mapping=rows, **changes)


def check(pool: LocalPool, sizes: tuple[int, ...], cases: list[Case]) -> None:
    cluster = cluster_of(*sizes)
    by_rank = pool.run(cluster.world_size, train, cluster, cases, timeout_s=300.0)
    for case, outcomes in zip(cases, zip(*by_rank, strict=True), strict=True):
        check_case(cluster, case, list(outcomes))


def check_case(cluster: Cluster, case: Case, outcomes: list[Outcome]) -> None:
    ranks = Layout.of(cluster, case.plan).data_degree
    found = deviation(outcomes, serial(case.model, ranks * case.num_micros))
    assert max(found.values()) < TOLERANCE, (case, found)
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint


@pytest.mark.parametrize("model", ["wide llama, 2 kv heads", "llama tied", "gpt2", "gpt_neox"])
@pytest.mark.parametrize("splits", [True, False])
def test_two_rows_equal_one_process(pool: LocalPool, model: str, splits: bool) -> None:
    plan = tensor(cluster_of(2), "ddp", {"package": {"tensor": 2}}, sequence_parallel=splits)
    check(pool, (2,), [Case(plan, num_micros=2, model=model)])


def factorings(total: int) -> list[tuple[int, int, int]]:
    """Every rows x columns x depth of `total` ranks."""
    return [
        (rows, columns, total // rows // columns)
        for rows in range(1, total + 1)
        for columns in range(1, total + 1)
        if total % (rows * columns) == 0
    ]


FAMILIES = ("wide llama, 1 kv head", "wide llama, 2 kv heads", "wide llama, 8 kv heads", "wide gpt2", "wide gpt_neox")


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("total", [4, 8])
def test_every_factoring_equals_one_process(pool: LocalPool, total: int, model: str) -> None:
    cluster = cluster_of(total)
    cases = []
    for index, (rows, columns, depth) in enumerate(factorings(total)):
        row = {"package": {"tensor": {"rows": rows, "columns": columns, "depth": depth}}}
        splits = index % 2 == total % 8 // 4  # each form for every other factoring; the other total has the others
        plan = tensor(cluster, "zero3", row, sequence_parallel=splits)
        cases.append(Case(plan, num_micros=2, model=model))
    check(pool, (total,), cases)


@pytest.mark.parametrize("name", ["ddp", "zero2", "zero3", "zero++", "three-level"])
@pytest.mark.parametrize(
    "rows",
    [
        {"package": {"tensor": 2}},
        {"node": {"tensor": 2}},
        {"system": {"tensor": {"columns": 2}}},
        {"package": {"tensor": 2}, "node": {"tensor": 2}},
        {"package": {"tensor": {"columns": 2}}, "system": {"tensor": {"rows": 2}}},
    ],
    ids=str,
)
def test_every_placement_of_states_beside_it(pool: LocalPool, name: str, rows: dict[str, Any]) -> None:
    cluster = cluster_of(2, 2, 2)
    cases = [
        Case(tensor(cluster, name, rows), num_micros=3, model="wide llama, 2 kv heads"),
        Case(tensor(cluster, name, rows, recompute=("*",), sequence_parallel=False), num_micros=2, model="wide gpt2"),
    ]
    check(pool, (2, 2, 2), cases)
