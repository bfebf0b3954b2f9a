"""Other chunks and divisions of experts than those of a plan."""

from dataclasses import replace

import pytest

from terrace.model.block_operations import layer_operations
from terrace.model.blocks import block_specs
from terrace.plan.presets import preset
from terrace.planner.advice import expert_changes
from terrace.report.routing import division_words
from terrace.simulate.footprint import work_of
from terrace.simulate.step import Step, predict_step
from tests.support.mixtures import PLAIN, mixture
from tests.support.toys import cluster_of


@pytest.mark.parametrize(("tier", "is_shared"), [("package", False), ("node", True)])
def test_a_plan_with_shares_of_gradients_has_both(tier: str, is_shared: bool) -> None:
    """The plan's four shares are of two chunks; on the tier behind the package no gradient shares a link."""
    cluster, model = cluster_of(2, 2, 2), mixture(replace(PLAIN, num_experts=16))
    plan = replace(
        preset("three-level", cluster),
        grads=tier,
        experts={tier: {"expert": 2}},
        expert_chunks={"forward": 2, "backward": 2},
        expert_gaps=(0.2, 0.3, 0.1, 0.4),
    )
    work = work_of(cluster, plan, layer_operations(model), 128)
    step = Step(cluster=cluster, plan=plan, blocks=tuple(block_specs(model)), num_micros=3, sequence=128, work=work)
    found = expert_changes(predict_step(step))
    assert [each.reason for each in found] == ["", ""]
    one_chunk, further = (each.plan for each in found)
    assert one_chunk.expert_chunks == {"forward": 1, "backward": 1, "ahead": 1}
    assert len(one_chunk.expert_gaps) <= 3, "of one chunk"
    assert further.experts != plan.experts
    assert is_shared or not further.expert_gaps


@pytest.mark.parametrize(("ahead", "other"), [(1, "3 chunks ahead"), (3, "1 chunk ahead")])
def test_the_other_order_of_chunks_is_priced(ahead: int, other: str) -> None:
    cluster, model = cluster_of(2, 2), mixture(replace(PLAIN, num_experts=16))
    plan = replace(
        preset("zero3", cluster),
        experts={"package": {"expert": 2}, "node": {"expert": 2}},
        expert_chunks={"forward": 4, "backward": 2, "ahead": ahead},
    )
    work = work_of(cluster, plan, layer_operations(model), 128)
    step = Step(cluster=cluster, plan=plan, blocks=tuple(block_specs(model)), num_micros=1, sequence=128, work=work)
    found = {each.words: each.plan for each in expert_changes(predict_step(step))}
    assert found.keys() == {"tokens in one chunk", other}
    assert found[other].expert_chunks == {"forward": 4, "backward": 2, "ahead": 4 - ahead}
    assert ("3 of them ahead" in division_words(plan)) == (ahead == 3)
