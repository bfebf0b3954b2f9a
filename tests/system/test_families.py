"""Families with norms of outputs, multipliers, caps and windows by layer under plans: the numbers of one process."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import PlanError
from terrace.launch.start import LocalPool
from terrace.plan.validate import validate
from tests.support.parity import Case, check, exact
from tests.support.toys import MODELS, Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

SHARED = "wide olmo2, 1 kv head"
ROWS = ("wide smollm3", "wide granite", "wide olmo2", "wide phi3", "wide gemma2", "wide gemma3", SHARED)


def case(model: str, mapping: dict[str, Any], degree: int, splits: bool, name: str = "ddp", **changes: object) -> Case:
    plan = exact(name, cluster_of(degree), mapping={"package": mapping}, sequence_parallel=splits, **changes)
    return Case(plan, num_micros=2, model=model)


def test_tensor_rows_and_columns_equal_one_process(pool: LocalPool) -> None:
    cases = [case("wide gemma2", {"tensor": 2}, 2, True), case("wide granite", {"tensor": 2}, 2, False)]
    cases.append(case(SHARED, {"tensor": 2}, 2, True))
    cases.append(case("wide olmo2", {"tensor": {"columns": 2}}, 2, True))
    check(pool, cluster_of(2), cases)


@pytest.mark.nightly
@pytest.mark.parametrize("splits", [True, False])
def test_every_family_is_cut_by_rows_and_by_columns(pool: LocalPool, splits: bool) -> None:
    check(pool, cluster_of(2), [case(model, {"tensor": 2}, 2, splits) for model in ROWS])
    check(pool, cluster_of(2), [case(model, {"tensor": {"columns": 2}}, 2, splits) for model in ROWS])
    both = {"tensor": {"rows": 2, "columns": 2}}
    check(pool, cluster_of(4), [case(model, both, 4, splits) for model in ROWS])


def test_stages_and_shards_equal_one_process(pool: LocalPool) -> None:
    """A tied embedding that is scaled and a head that caps, on stages of their own."""
    cases = [case(model, {"pipeline": 2}, 2, True) for model in ("wide gemma2", "wide granite")]
    shards = exact("zero3", cluster_of(2), recompute=("block.*: attention, mlp",))
    check(pool, cluster_of(2), [*cases, Case(shards, num_micros=2, model="wide olmo2")])


def test_ranks_attend_together_by_the_window_of_each_layer(pool: LocalPool) -> None:
    """A ring and Ulysses; rows with several documents too."""
    models = ("wide gemma3", "wide smollm3")
    cases = [case(model, {"context": {"ulysses": 2}}, 2, True) for model in (models[1], "wide granite")]
    for model in models:
        packed = Rows(12, ((5, 1, 6), (12,), (7, 5), (4, 8)))
        cases.append(replace(case(model, {"context": {"ring": 2}}, 2, True), rows=packed))
    check(pool, cluster_of(2), cases)


CONTEXT = {"mapping": {"package": {"context": 2}}}


@pytest.mark.parametrize(
    ("model", "plan", "message"),
    [
        ("wide gemma3", CONTEXT | {"balance": "cost"}, r"differ in their windows \(no window and a window of 3\)"),
        ("wide gemma2", CONTEXT, "cannot be spread over context ranks"),
        ("wide olmo2", {"recompute": ("layers.*: norms",)}, "has none before attention and MLP"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(model: str, plan: dict[str, Any], message: str) -> None:
    cluster = cluster_of(2)
    with pytest.raises(PlanError, match=message) as found:
        validate(cluster, exact("ddp", cluster, **plan), MODELS[model].declared)
    assert "\n" not in str(found.value)
