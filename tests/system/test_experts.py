"""Experts on several ranks: the same numbers as one process, and the bytes that each batch declares."""

from collections.abc import Mapping
from typing import Any

import pytest

from terrace.cluster.cluster import Cluster
from terrace.launch.start import LocalPool
from terrace.plan.plan import Plan
from tests.support.parity import Case, check, exact
from tests.support.toys import cluster_of

pytestmark = pytest.mark.timeout(360)

Table = Mapping[str, Mapping[str, int]]


def spread(cluster: Cluster, name: str, experts: Table, **changes: Any) -> Plan:
    return exact(name, cluster, experts=experts, **changes)


def test_two_ranks_hold_different_experts(pool: LocalPool) -> None:
    cluster, table = cluster_of(2), {"package": {"expert": 2}}
    models = ("experts", "experts in groups", "mixture, shared expert", "one of many experts", "all experts")
    cases = [Case(spread(cluster, "zero3", table), num_micros=2, model=model) for model in models]
    check(pool, cluster, cases)


EIGHT: dict[str, Table] = {
    "package": {"package": {"expert": 2}},
    "system": {"system": {"expert": 2}},
    "everywhere": {"package": {"expert": 2}, "node": {"expert": 2}, "system": {"expert": 2}},
    "two outer tiers": {"node": {"expert": 2}, "system": {"expert": 2}},
    "rows inside": {"package": {"rows": 2}, "system": {"expert": 2}},
    "rows outside": {"package": {"expert": 2}, "node": {"rows": 2}},
    "rows twice": {"package": {"rows": 2}, "node": {"rows": 2}, "system": {"expert": 2}},
    "rows alone": {"package": {"rows": 2}, "node": {"rows": 2}, "system": {"rows": 2}},
}


@pytest.mark.parametrize("table", EIGHT)
def test_every_factoring_of_eight(pool: LocalPool, table: str) -> None:
    cluster = cluster_of(2, 2, 2)
    names = ("three-level", "ddp", "zero3") if table == "everywhere" else ("three-level",)
    models = ("experts", "experts in groups")
    check(
        pool,
        cluster,
        [Case(spread(cluster, name, EIGHT[table]), num_micros=2, model=model) for name in names for model in models],
    )
