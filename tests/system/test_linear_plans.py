"""Linear layers, and attention with a gate beside them, under plans: the numbers of one process."""

from typing import Any

import pytest

from terrace.launch.start import LocalPool
from tests.support.nightly import nightly
from tests.support.parity import Case, check, exact
from tests.support.toys import WHOLE_ROWS, Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

# Two key heads for four heads of values; more of both; six layers; no layer attends; experts.
LINEAR, WIDE, DEEP, ALONE, EXPERTS = "linear", "wide linear", "deep linear", "linear alone", "linear experts"
KIMI, DEEP_KIMI = "kimi", "deep kimi"  # a decay for each element of a key, beside latent attention; six layers


LONG = Rows(16)  # four chunks of four tokens on two ranks


def case(
    model: str, ranks: int, mapping: dict[str, Any], name: str = "ddp", rows: Rows = WHOLE_ROWS, **changes: object
) -> Case:
    plan = exact(name, cluster_of(ranks), mapping={"package": mapping}, **changes)
    return Case(plan, num_micros=2, model=model, rows=rows)


def test_two_ranks_equal_one_process(pool: LocalPool) -> None:
    """Rows with and without sequence parallelism, stages, shards, recomputation, experts."""
    cases = [
        case(LINEAR, 2, {"tensor": 2}, recompute=("block.*: attention",)),
        case(WIDE, 2, {"tensor": 2}, sequence_parallel=False),
        case(DEEP, 2, {"pipeline": 2}, schedule="zbv"),
        case(LINEAR, 2, {"data": 2}, "zero3", recompute=("block.*",)),
        case(LINEAR, 2, {"context": {"ring": 2}}, rows=LONG),
        case(DEEP, 2, {"context": {"ring": 2}}, "zero3", rows=LONG, recompute=("block.*",)),
        case(ALONE, 2, {"context": {"ring": 2}}, rows=LONG),
        case(EXPERTS, 2, {"data": 2}, "zero1", experts={"package": {"expert": 2}}),
    ]
    check(pool, cluster_of(2), cases)


def test_decays_of_each_element_equal_one_process(pool: LocalPool) -> None:
    packed = Rows(16, ((5, 1, 10), (16,), (9, 7), (4, 12)))
    cases = [
        case(KIMI, 2, {"tensor": 2}),
        case(KIMI, 2, {"context": {"ring": 2}}, "zero3", rows=packed),
        case(DEEP_KIMI, 2, {"pipeline": 2}),
    ]
    check(pool, cluster_of(2), cases)


def test_a_state_ends_with_its_document(pool: LocalPool) -> None:
    packed = Rows(12, ((5, 1, 6), (12,), (7, 5), (4, 8)))
    cases = [case(LINEAR, 2, {"data": 2}, "zero3", rows=packed), case(LINEAR, 2, {"context": {"ring": 2}}, rows=packed)]
    check(pool, cluster_of(2), cases)


@pytest.mark.parametrize("splits", nightly(True, False))
def test_axes_together_equal_one_process(pool: LocalPool, splits: bool) -> None:
    cases = [
        case(LINEAR, 4, {"tensor": 4}, sequence_parallel=splits),
        case(WIDE, 4, {"tensor": 2, "data": 2}, "zero3", sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "data": 2}, "zero1"),
        case(WIDE, 4, {"context": {"ring": 4}}, rows=Rows(24), sequence_parallel=splits),
        case(WIDE, 4, {"tensor": 2, "context": {"ring": 2}}, "zero3", rows=LONG, sequence_parallel=splits),
        case(DEEP, 4, {"pipeline": 2, "context": {"ring": 2}}, rows=LONG),
        case(DEEP, 4, {"pipeline": 2, "tensor": 2}, schedule="zb-h1", sequence_parallel=splits),
        case(EXPERTS, 4, {"tensor": 2, "data": 2}, experts={"package": {"expert": 4}}, sequence_parallel=splits),
        case(KIMI, 4, {"tensor": 2, "context": {"ring": 2}}, "zero3", rows=LONG, sequence_parallel=splits),
        case(KIMI, 4, {"data": 4}, "zero3", experts={"package": {"expert": 4}}, recompute=("block.*",)),
    ]
    check(pool, cluster_of(4), cases)
