"""Links of members in a run that measures its own: those of the cluster's file hold, at the pace of the run."""

from dataclasses import replace

import pytest

from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member
from terrace.comm.pace import UNPACED
from terrace.lab.pace import Pacer
from terrace.train.calibrate import _measured, _members, _scale
from tests.support.toys import cluster_of


def slow_last() -> Cluster:
    own = cluster_of(1, 3)
    *inner, tier = own.tiers
    members = (Member(count=2), Member(speed=0.5, bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / 10, latency_s=1.0))
    return replace(own, tiers=(*inner, replace(tier, members=members)))


@pytest.mark.parametrize("scale", [0.0, 1.0, 0.25])
def test_only_the_slow_member_has_a_slow_link(scale: float) -> None:
    cluster = slow_last()
    tier = cluster.tiers[-1]
    pacer = Pacer(cluster, scale) if scale else UNPACED
    times = _scale(cluster, pacer)
    assert times == pytest.approx(scale or 1.0)
    members = _members(tier, (1.25, 1.0, 0.75), times)
    assert [each.speed for each in members] == [1.25, 1.0, 0.75], "measured, whatever the file says"
    assert [each.bandwidth_bytes_per_s for each in members[:2]] == [None, None]
    assert members[2].bandwidth_bytes_per_s == pytest.approx(times * tier.bandwidth_bytes_per_s / 10)
    assert members[2].latency_s == pytest.approx(1.0 / times)
    # The loopback is faster than any paced link.
    found = _measured(tier, 1e-9, 1e15, pacer)
    if scale:
        assert found.bandwidth_bytes_per_s == pytest.approx(scale * tier.bandwidth_bytes_per_s)
        assert found.latency_s == pytest.approx(tier.latency_s / scale)
    else:
        assert (found.latency_s, found.bandwidth_bytes_per_s) == (1e-9, 1e15)
