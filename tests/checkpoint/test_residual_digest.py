"""The digest of a plan's residuals: equal where each belongs to the same sums of the same parameters."""

from dataclasses import replace
from typing import Any

from terrace.checkpoint.residuals import digest
from terrace.model.config import block_specs
from terrace.plan.presets import preset
from terrace.program.lowering import build
from tests.support.mixtures import mixture
from tests.support.toys import cluster_of

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
