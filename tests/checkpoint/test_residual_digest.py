"""The digest of a plan's residuals: equal where each belongs to the same sums of the same parameters."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.checkpoint import residuals
from terrace.checkpoint.residuals import digest
from terrace.cluster.cluster import Cluster
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.program.lowering import build, build_stages
from tests.support.mixtures import mixture
from tests.support.toys import MODELS, cluster_of

CLUSTER = cluster_of(2, 2)
EXPERTS: list[dict[str, Any]] = [
    {},
    {"experts": {"node": {"expert": 2}}},
    {"experts": {"node": {"rows": 2}}},
    {"experts": {"package": {"expert": 2}}},
    {"experts": {"node": {"expert": 2}}, "expert_gaps": (0, 0.5, 0.5)},
]


def digest_of(**changes: Any) -> str:
    wire = {"reduce": {"node": "int8+feedback"}}
    plan = replace(preset("zero3", CLUSTER), wire=wire, **changes)
    return digest(build(CLUSTER, plan, block_specs(mixture()), 2, 16))


def test_other_ranks_of_experts_have_other_residuals() -> None:
    found = [digest_of(**each) for each in EXPERTS]
    assert all(found)
    assert len(set(found)) == len(found)
    chunks = {"forward": 2, "backward": 2}
    assert digest_of(**EXPERTS[1], expert_chunks=chunks) == found[1], "chunks are of products, not of gradients"


@pytest.mark.parametrize(
    ("cluster", "wire", "is_other"),
    [
        (cluster_of(2, 2), "int8+feedback", True),
        (cluster_of(2, 3), "int8+feedback", False),
        (cluster_of(2, 2), "topk+feedback", False),
    ],
)
def test_sums_that_go_whole_between_two_members_have_other_residuals(
    monkeypatch: pytest.MonkeyPatch, cluster: Cluster, wire: str, is_other: bool
) -> None:
    """Than checkpoints have of the time when only sparse messages went so; all others keep their residuals."""
    inside = cluster.tiers[0].name
    plan = replace(preset("zero2", cluster), grads=inside, optimizer=inside, wire={"sync": {"node": wire}})
    program = build(cluster, plan, block_specs(mixture()), 3, 16)
    now = digest(program)
    monkeypatch.setattr(residuals, "between_two", lambda *_: [])
    assert (digest(program) != now) == is_other


def test_members_in_another_order_have_other_residuals() -> None:
    """A rank then has other stages; one boundary with feedback is enough."""
    cluster, wire = cluster_of(1, 3), {"pipeline_backward": {"node": "bf16, int8+feedback"}}
    plan = replace(preset("ddp", cluster), mapping={"node": {"pipeline": 3}}, wire=wire)
    plans = [plan, replace(plan, order=(1, 0, 2))]
    found = [digest(build_stages(cluster, each, MODELS["deep llama tied"].declared, 6, 16)[0]) for each in plans]
    assert all(found)
    assert found[0] != found[1]
