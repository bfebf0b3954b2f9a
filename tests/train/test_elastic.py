"""A run fitted to the ranks that were started: sizes of tiers, micro-batches, and plans that do not fit."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import PlanError
from terrace.train.layers import resolve_table
from terrace.train.resolve import fitted_cluster, fitted_run
from tests.support.tiny_runs import write_run
from tests.support.toys import cluster_of


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "fitted"),
    [
        ((2, 2, 4), 12, (2, 2, 3)),
        ((2, 2, 4), 6, (2, 3, 1)),
        ((2, 2, 4), 2, (2, 1, 1)),
        ((2, 2, 4), 3, (3, 1, 1)),
        ((2, 2, 4), 32, (2, 2, 8)),
        ((8, 4), 8, (8, 1)),
        ((8, 4), 4, (4, 1)),
        ((4,), 7, (7,)),
    ],
)
def test_the_outermost_tier_that_can_is_resized(
    sizes: tuple[int, ...], num_ranks: int, fitted: tuple[int, ...]
) -> None:
    assert tuple(tier.size for tier in fitted_cluster(cluster_of(*sizes), num_ranks).tiers) == fitted


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4), num_ranks=st.integers(1, 60))
def test_all_ranks_are_used_and_inner_tiers_stay(sizes: list[int], num_ranks: int) -> None:
    fitted = [tier.size for tier in fitted_cluster(cluster_of(*sizes), num_ranks).tiers]
    assert math.prod(fitted) == num_ranks
    changed = [index for index, (old, new) in enumerate(zip(sizes, fitted, strict=True)) if old != new]
    if changed and num_ranks % math.prod(sizes[:-1]) == 0:
        assert changed == [len(sizes) - 1]


def table(folder: Path, plan: dict[str, Any]) -> dict[str, Any]:
    write_run(folder, 2, 2)
    return resolve_table(str(folder / "run.toml"), {}, {"plan": plan})


def test_the_plan_is_read_anew_and_the_batch_stays(tmp_path: Path) -> None:
    given = table(tmp_path, {"micro_batch": 2})
    same, said = fitted_run(given, 4)
    assert (same.cluster.world_size, said) == (4, "")
    run, said = fitted_run(given, 8)
    assert said == "8 ranks in place of 4: node 2 -> 4, plan.micro_batch 2 -> 1"
    assert (run.train.batch, run.num_micros(), run.plan.optimizer) == (8, 1, "node")
    run, said = fitted_run(given, 2)
    assert said == "2 ranks in place of 4: node 2 -> 1"
    assert (run.num_micros(), run.plan.micro_batch) == (2, 2)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        PlanError,
        match=r"3 ranks were started where cluster 'test' has 4; with package 2 -> 3, node 2 -> 1 the plan does not "
        "fit: batch = 8 is not a multiple of",
    ):
        fitted_run(table(tmp_path, {}), 3)
    mapped = table(tmp_path, {"preset": "ddp", "mapping": {"node": {"pipeline": 2}}})
    with pytest.raises(PlanError, match=r"8 ranks were started .* does not fit: the degrees of mapping\.node"):
        fitted_run(mapped, 8)
