"""Layers that predict further tokens, under plans, against decoder layers of transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from terrace.launch.start import LocalPool
from tests.support.further_reference import reference_steps
from tests.support.parity import Case, exact, num_rows, run
from tests.support.toys import FURTHER_WEIGHT, WHOLE_ROWS, Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

# AdamW divides by the size of gradients, which makes the rounding of small ones larger before the second step.
WITHIN = (1e-10, 1e-9)
LATENT, TWO, DEEP = "further, latent", "further, two", "deep further"
PACKED = Rows(12, ((5, 1, 6), (12,), (7, 5), (4, 8)))


def case(model: str, ranks: int, mapping: dict[str, Any], name: str = "ddp", **changes: object) -> Case:
    plan = exact(name, cluster_of(ranks), mapping={"package": mapping}, **changes)
    return Case(plan, num_micros=2, model=model)


def check(pool: LocalPool, ranks: int, cases: list[Case], folder: Path) -> None:
    cluster, known = cluster_of(ranks), {}
    for index, (each, outcomes) in enumerate(zip(cases, run(pool, cluster, cases), strict=True)):
        key = each.model, num_rows(cluster, each), each.rows
        if key not in known:
            known[key] = reference_steps(*key, FURTHER_WEIGHT, folder / str(index))
        for outcome in outcomes:
            found = zip(outcome.losses, outcome.norms, strict=True)
            for (loss, norm), (wanted, _, of_gradient), within in zip(found, known[key], WITHIN, strict=True):
                assert (loss, norm) == pytest.approx((wanted, of_gradient), abs=within), each
            assert not outcome.complaint, each


def test_two_processes_equal_the_reference(pool: LocalPool, tmp_path: Path) -> None:
    """Shards, rows, stages behind the last layers, a ring over packed documents."""
    cases = [
        case(LATENT, 2, {"data": 2}, "zero3", recompute=("block.*",)),
        case(LATENT, 2, {"tensor": 2}, sequence_parallel=False),
        case(TWO, 2, {"pipeline": 2}, stages=(4, 2)),
        replace(case(TWO, 2, {"context": {"ring": 2}}), rows=PACKED),
    ]
    check(pool, 2, cases, tmp_path)


@pytest.mark.nightly
def test_one_process_and_further_plans_equal_the_reference(pool: LocalPool, tmp_path: Path) -> None:
    """Whole rows and packed documents; stages before the last layers, experts."""
    alone = [replace(case(model, 1, {}), rows=rows) for model in (LATENT, TWO) for rows in (WHOLE_ROWS, PACKED)]
    check(pool, 1, alone, tmp_path / "one")
    cases = [
        case(TWO, 2, {"tensor": 2}),
        case(DEEP, 2, {"pipeline": 2}, "zero1", stages=(8, 1), schedule="zb-h1"),
        case(LATENT, 2, {"data": 2}, experts={"package": {"expert": 2}}),
    ]
    check(pool, 2, cases, tmp_path / "two")


@pytest.mark.nightly
def test_axes_together_equal_the_reference(pool: LocalPool, tmp_path: Path) -> None:
    cases = [
        case(LATENT, 4, {"tensor": 2, "context": {"ulysses": 2}}, "zero3"),
        case(TWO, 4, {"tensor": 2, "pipeline": 2}, stages=(5, 1)),
        case(TWO, 4, {"tensor": 2, "pipeline": 2}, stages=(4, 2), sequence_parallel=False),
        case(DEEP, 4, {"pipeline": 2, "data": 2}, "zero1", experts={"package": {"expert": 2}}),
        case(DEEP, 4, {"data": 4}, "zero3", recompute=("block.*: attention",)),
    ]
    check(pool, 4, cases, tmp_path)
