"""MFU of members that differ: over the mean of their peaks."""

from dataclasses import replace

import pytest

from terrace.cluster.members import Member
from terrace.cluster.presets import load_cluster
from terrace.plan.presets import preset
from terrace.train.utilisation import utilisation
from tests.support.toys import MODELS


def test_the_peak_of_unequal_members_is_their_mean() -> None:
    cluster = load_cluster("dgx-h100").resized(4)
    peak = cluster.device.peak_flops_per_s["bf16"]
    slower = (Member(), Member(count=2, speed=0.5), Member(speed=0.25))
    tiers = (*cluster.tiers[:-1], replace(cluster.tiers[-1], members=slower))
    mixed, plan = replace(cluster, tiers=tiers), replace(preset("ddp", cluster), compute="bf16")
    blocks = MODELS["llama tied"].declared
    found, alike = (
        utilisation(blocks, plan, 8, 16, cluster=each, measured=each, backend="cuda") for each in (mixed, cluster)
    )
    assert alike.peak_flops_per_s == peak
    assert found.peak_flops_per_s == pytest.approx(peak * (1 + 2 * 0.5 + 0.25) / 4)
    assert found.mfu(1.0) == pytest.approx(alike.mfu(1.0) * 4 / 2.25)
    assert "the mean over unequal members" in found.origin
