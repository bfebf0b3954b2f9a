"""Attention over context ranks in block formats: the numbers of one process that rounds the rows that travel."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from terrace.launch.start import LocalPool
from terrace.plan.context import ContextGroup
from terrace.plan.mesh import Mesh
from terrace.plan.plan import Plan
from terrace.sequence.static import static_group_layout
from tests.support.coded_attention import CodedPlans
from tests.support.coded_edges import coded_serial
from tests.support.nightly import nightly
from tests.support.parity import TOLERANCE, Case, deviation, exact, run
from tests.support.toys import Rows, cluster_of

pytestmark = pytest.mark.timeout(360)

ROWS, INT8, FP8 = Rows(sequence=8), "int8:16", "fp8:16"
BOTH = {"package": {"context": {"ulysses": 2}}, "node": {"context": {"ring": 2}}}
RING_INSIDE = {"package": {"context": {"ring": 2}}, "node": {"context": {"ulysses": 2}}}


def deviations(pool: LocalPool, mapping: dict[str, Any], wire: dict[str, str], **changes: Any) -> dict[str, float]:
    """How far a run is from one process; its bytes are the formula's."""
    cluster = cluster_of(2, 2)
    sabotage = changes.pop("sabotage", "")
    plan: Plan = replace(exact("zero2", cluster, mapping=mapping, **changes), wire={"context": wire})
    case = Case(plan, num_micros=2, model="llama tied", rows=ROWS, sabotage=sabotage)
    mesh, group = Mesh.of(cluster, plan), ContextGroup.of(cluster, plan, 0)
    held = static_group_layout(plan, mesh, ROWS.sequence, 0, [0]).local_runs
    members = torch.empty(ROWS.sequence, dtype=torch.int64)
    for member, runs in enumerate(held):
        for start, stop in runs:
            members[start:stop] = member
    tiers = {axis: tier for tier, row in mapping.items() for axis in row["context"]}
    plans = CodedPlans(
        members // group.ulysses,
        members % group.ulysses,
        group.ulysses,
        dealt=wire.get(tiers["ulysses"], ""),
        ring=wire.get(tiers["ring"], ""),
    )
    (outcomes,) = run(pool, cluster, [case])
    assert not any(outcome.complaint for outcome in outcomes), outcomes[0].complaint
    return deviation(outcomes, coded_serial(case, {}, 1, prepare=plans.put_into))


@pytest.mark.parametrize(
    ("mapping", "wire", "changes"),
    [
        (BOTH, {"node": FP8, "package": INT8}, {"recompute": ("*",)}),
        *nightly(
            (BOTH, {"node": INT8}, {}),
            (RING_INSIDE, {"node": INT8}, {}),
            (RING_INSIDE, {"package": FP8}, {"recompute": ("*",)}),
            (RING_INSIDE, {"package": INT8, "node": FP8}, {}),
        ),
    ],
    ids=str,
)
def test_a_run_is_one_process_that_rounds_rows_on_their_way(
    pool: LocalPool, mapping: dict[str, Any], wire: dict[str, str], changes: dict[str, Any]
) -> None:
    found = deviations(pool, mapping, wire, **changes)
    assert max(found.values()) < TOLERANCE, found


def test_comparison_sees_rows_that_are_rounded_twice(pool: LocalPool) -> None:
    found = deviations(pool, BOTH, {"node": INT8}, sabotage="rows_rounded_twice")
    assert all(each > 100 * TOLERANCE for each in found.values()), found
