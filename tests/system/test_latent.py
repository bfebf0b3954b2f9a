"""Latent attention under plans: the numbers of one process, whatever its queries, keys and experts are cut by."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.launch.start import LocalPool
from tests.support.nightly import nightly
from tests.support.parity import Case, check, exact
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

# Queries of a rank, with experts or without, or whole; six layers.
RANKED, DENSE, WHOLE, DEEP = "latent", "dense latent", "wide latent", "deep latent"


def case(model: str, ranks: int, mapping: dict[str, Any], name: str = "ddp", **changes: object) -> Case:
    plan = exact(name, cluster_of(ranks), mapping={"package": mapping}, **changes)
    return Case(plan, num_micros=2, model=model)


@pytest.mark.parametrize("half", [0, *nightly(1)])
def test_two_ranks_equal_one_process(pool: LocalPool, half: int) -> None:
    """Rows with and without sequence parallelism, in parts, columns, ring, Ulysses, stages, shards, experts."""
    cases = [
        case(RANKED, 2, {"tensor": 2}),
        case(RANKED, 2, {"tensor": 2}, tensor_chunks=2),
        case(WHOLE, 2, {"tensor": 2}, sequence_parallel=False),
        case(RANKED, 2, {"context": {"ring": 2}}),
        case(DENSE, 2, {"tensor": {"columns": 2}}),
        case(WHOLE, 2, {"context": {"ulysses": 2}}),
        case(DEEP, 2, {"pipeline": 2}, schedule="zb-h1"),
        case(RANKED, 2, {"data": 2}, "zero3", recompute=("block.*",)),
        case(RANKED, 2, {"data": 2}, "zero3", recompute=("block.*: attention",)),
        case(RANKED, 2, {"data": 2}, experts={"package": {"expert": 2}}),
    ]
    check(pool, cluster_of(2), cases[half::2])


def test_packed_documents_attend_to_themselves(pool: LocalPool) -> None:
    packed = Rows(12, ((5, 1, 6), (12,), (7, 5), (4, 8)))
    cases = [case(RANKED, 2, {"context": {"ring": 2}}), case(WHOLE, 2, {"context": {"ulysses": 2}})]
    check(pool, cluster_of(2), [replace(each, rows=packed) for each in cases])


@pytest.mark.parametrize("splits", [True, *nightly(False)])
def test_axes_together_equal_one_process(pool: LocalPool, splits: bool) -> None:
    cases = [
        case(WHOLE, 4, {"tensor": {"rows": 2, "columns": 2}}, sequence_parallel=splits),
        case(RANKED, 4, {"tensor": 2, "context": {"ulysses": 2}}, "zero3", sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "context": {"ring": 2}}, sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "data": 2}, "zero1", experts={"package": {"expert": 2}}),
    ]
    check(pool, cluster_of(4), cases)
