"""Attention sinks and experts with biases under plans: the numbers of one process."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.launch.start import LocalPool
from terrace.model.balance import BalanceConfig
from tests.support.nightly import nightly
from tests.support.parity import Case, check, exact
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

# Two heads on a key-value head, or more; six layers, whole or partly frozen.
SUNK, WIDE, SHARED, DEEP = "sunk", "wide sunk", "wide sunk, 1 kv head", "deep sunk"
FROZEN = "deep sunk, frozen parts"


def case(model: str, ranks: int, mapping: dict[str, Any], name: str = "ddp", **changes: object) -> Case:
    plan = exact(name, cluster_of(ranks), mapping={"package": mapping}, **changes)
    return Case(plan, num_micros=2, model=model)


def test_two_ranks_equal_one_process(pool: LocalPool) -> None:
    """Rows with and without sequence parallelism, stages, shards, experts and parts of experts, losses of routers."""
    balance = BalanceConfig(sequence=0.3, step=0.4, z=0.2)
    parts = case(SUNK, 2, {"data": 2}, "zero3", experts={"package": {"rows": 2}}, recompute=("block.*",))
    cases = [
        case(SUNK, 2, {"tensor": 2}, recompute=("block.*: attention",)),
        case(SHARED, 2, {"tensor": 2}, sequence_parallel=False),
        case(DEEP, 2, {"pipeline": 2}, schedule="zbv"),
        case(SUNK, 2, {"data": 2}, experts={"package": {"expert": 2}}),
        replace(parts, balance=balance),
    ]
    check(pool, cluster_of(2), cases)


def test_packed_documents_attend_to_themselves(pool: LocalPool) -> None:
    packed = Rows(12, ((5, 1, 6), (12,), (7, 5), (4, 8)))
    cases = [case(SUNK, 2, {"context": {"ring": 2}}), case(WIDE, 2, {"context": {"ulysses": 2}})]
    check(pool, cluster_of(2), [replace(each, rows=packed) for each in cases])


@pytest.mark.parametrize("splits", nightly(True, False))
def test_axes_together_equal_one_process(pool: LocalPool, splits: bool) -> None:
    cases = [
        case(WIDE, 4, {"tensor": 2, "context": {"ulysses": 2}}, "zero3", sequence_parallel=splits),
        case(SHARED, 4, {"tensor": 4}, sequence_parallel=splits),
        case(SHARED, 4, {"data": 2, "context": {"ulysses": 2}}, "zero2", sequence_parallel=splits),
        case(WIDE, 4, {"context": {"ulysses": 2, "ring": 2}}, sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "context": {"ring": 2}}, sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "data": 2}, "zero1", experts={"package": {"expert": 2}}),
        case(FROZEN, 4, {"pipeline": 2, "tensor": 2}, schedule="zb-h1", sequence_parallel=splits),
        case(SUNK, 4, {"data": 4}, "zero1", experts={"package": {"expert": 2, "rows": 2}}),
        case(SUNK, 4, {"tensor": 2, "data": 2}, experts={"package": {"expert": 4}}, sequence_parallel=splits),
    ]
    check(pool, cluster_of(4), cases)
