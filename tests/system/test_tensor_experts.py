"""Tensor rows beside experts: each row routes a part of the tokens, and the numbers are those of one process."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from terrace.launch.start import LocalPool
from terrace.model.balance import BalanceConfig
from terrace.model.block_operations import layer_operations
from terrace.plan.plan import Plan
from terrace.plan.presets import preset
from terrace.simulate.work import Work
from tests.support.activations import layer_activations
from tests.support.mixtures import SHARED, mixture
from tests.support.nightly import nightly
from tests.support.parity import Case, check, exact
from tests.support.tensor_memory import kept_by_a_layer
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

Table = Mapping[str, Mapping[str, Any]]


def plan(sizes: tuple[int, ...], name: str, mapping: Table, experts: Table, splits: bool, **changes: Any) -> Plan:
    return exact(name, cluster_of(*sizes), mapping=mapping, experts=experts, sequence_parallel=splits, **changes)


@pytest.mark.nightly
def test_two_rows_hold_all_experts(pool: LocalPool) -> None:
    """Every kind of mixture once; a shared expert and its gate are cut and held as an MLP and a norm are."""
    models = ("mixture tied", "mixture, grouped", "mixture, shared expert", "experts, noisy", "experts, cosine")
    cases = []
    for index, model in enumerate(models):
        for splits in (True, False):
            again = ("block.2",) if splits == (index % 2 == 0) else ()
            placement = ("ddp", "zero3")[index % 2]
            made = plan((2,), placement, {"package": {"tensor": 2}}, {}, splits, recompute=again)
            cases.append(Case(made, num_micros=2, model=model))
    check(pool, cluster_of(2), cases)


@pytest.mark.parametrize("splits", [True, *nightly(False)])
def test_counts_are_of_all_rows(pool: LocalPool, splits: bool) -> None:
    """A bias that moves by the loads of experts sees the tokens of every row once."""
    moved = BalanceConfig(bias=0.05)
    cases = [
        Case(plan((2,), "zero3", {"package": {"tensor": 2}}, table, splits), 2, "experts in groups", balance=moved)
        for table in ({}, {"package": {"expert": 2}})
    ]
    check(pool, cluster_of(2), cases)


FOUR: list[tuple[Table, Table]] = [
    # Six tokens on four rows: the last has none.
    ({"package": {"tensor": 2}, "node": {"tensor": 2}}, {}),
    ({"package": {"tensor": 2}, "node": {"tensor": 2}}, {"package": {"expert": 2}, "node": {"expert": 2}}),
    ({"package": {"tensor": 2}}, {"package": {"rows": 2}, "node": {"expert": 2}}),
    ({"node": {"tensor": 2}}, {"package": {"expert": 2}}),
]


@pytest.mark.parametrize(("index", "splits"), [(1, True), *nightly(*product((0, 2, 3), (True, False)), (1, False))])
def test_four_ranks_in_two_factorings(pool: LocalPool, index: int, splits: bool) -> None:
    made = plan((2, 2), ("three-level", "zero1")[index % 2], *FOUR[index], splits)
    check(pool, cluster_of(2, 2), [Case(made, num_micros=2, model="wide experts")])


EIGHT: dict[str, tuple[Table, Table, dict[str, Any]]] = {
    "stages": (
        {"package": {"tensor": 2}, "system": {"pipeline": 2}},
        {"package": {"expert": 2}, "node": {"rows": 2}},
        {},
    ),
    "zbv": (
        {"package": {"tensor": 2}, "node": {"pipeline": 2}},
        {"system": {"expert": 2}, "package": {"rows": 2}},
        {"schedule": "zbv"},
    ),
    "ring": ({"package": {"tensor": 2}, "node": {"context": 2}}, {"node": {"expert": 2}, "system": {"expert": 2}}, {}),
    "recomputed": (
        {"node": {"tensor": 2}},
        {"package": {"expert": 2}, "node": {"expert": 2}, "system": {"rows": 2}},
        {"recompute": ("block.[2-5]",), "unit": 2},
    ),
    "ends without a layer": (
        {"package": {"tensor": 2}, "system": {"pipeline": 2}},
        {"package": {"expert": 2}, "node": {"expert": 2}},
        {"schedule": "zbv", "stages": (1, 3, 3, 1)},
    ),
    "stages, all experts": ({"package": {"tensor": 2}, "system": {"pipeline": 2}}, {}, {"schedule": "zb-h1"}),
}


@pytest.mark.parametrize("name", nightly(*EIGHT))
def test_beside_other_axes(pool: LocalPool, name: str) -> None:
    mapping, experts, changes = EIGHT[name]
    cases = [
        Case(
            plan((2, 2, 2), placement, mapping, experts, splits, **changes),
            num_micros=4,
            model="deep experts",
            rows=Rows(7),
        )
        for placement, splits in (("three-level", True), ("zero3", False))
    ]
    check(pool, cluster_of(2, 2, 2), cases)


def test_a_row_keeps_its_part_of_the_tokens(pool: LocalPool) -> None:
    """The account of activations against torch's allocations, with a shared expert and its gate."""
    model, sequence, batch = mixture(SHARED, layers=1), 256, 2
    for splits in (True, False):
        made = replace(preset("ddp", cluster_of(2)), mapping={"package": {"tensor": 2}}, micro_batch=batch)
        made = replace(made, compute="fp32", wire={}, sequence_parallel=splits)
        work = Work(layer=layer_operations(model), sequence=sequence, micro_batch=batch, tensor=2, compute="fp32")
        wanted = layer_activations(replace(work, sequence_parallel=splits), "cpu").kept_bytes
        kept = pool.run(2, kept_by_a_layer, cluster_of(2), made, model, sequence, timeout_s=60.0)
        assert max(kept) == pytest.approx(wanted, rel=0.03), splits
