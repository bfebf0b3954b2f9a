"""Messages on tiers: closed answers, bounds."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.validation.bandwidth import gather_s, nested, ring_s
from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Cluster, Device, Tier
from terrace.cluster.presets import load_cluster
from terrace.simulate.links import (
    exchange_tiers,
    rate_bytes_per_s,
    send_s,
)
from terrace.simulate.links import ring_s as one_ring_s

DEVICE = Device(name="device", memory_bytes=1e9, memory_bandwidth_bytes_per_s=1e12, peak_flops_per_s={"bf16": 1e12})


def _tier(name: str, size: int, gigabytes: float, latency_s: float = 0.0, **more: float) -> Tier:
    return Tier(name=name, size=size, bandwidth_bytes_per_s=gigabytes * 1e9, latency_s=latency_s, **more)  # type: ignore[arg-type]


PLAIN = Cluster(name="plain", device=DEVICE, tiers=(_tier("node", 8, 300), _tier("system", 4, 25)))
sizes = st.floats(1, 1e10)
presets = st.sampled_from(["dgx-a100", "frontier", "perlmutter", "ethernet", "gb200-nvl72"]).map(load_cluster)


def test_a_ring_inside_a_tier() -> None:
    assert gather_s(PLAIN, (8,), 300e9) == pytest.approx(7 / 8)
    late = replace(PLAIN, tiers=(_tier("node", 8, 300, 1.0), PLAIN.tiers[1]))
    assert gather_s(late, (8,), 300e9) == pytest.approx(7 + 7 / 8)
    assert send_s(late, 0, 300e9) == pytest.approx(2.0)


def test_two_tiers_follow_one_another() -> None:
    """16 ranks on 2 nodes; one ring over all, which published bandwidths are of, leaves a node over eight links."""
    cluster = replace(PLAIN, tiers=(_tier("node", 8, 1), _tier("system", 4, 0.5)))
    assert gather_s(cluster, (8, 2), 1e9) == pytest.approx(7 / 8 + 1 / 2 / 8 / 0.5)
    assert ring_s(cluster, (8, 2), 1e9) == pytest.approx(15 / 16)
    slow = replace(PLAIN, tiers=(_tier("node", 8, 100), _tier("system", 4, 0.5)))
    assert gather_s(slow, (8, 2), 1e9) == pytest.approx(7 / 8 / 100 + 1 / 2 / 8 / 0.5)
    assert ring_s(slow, (8, 2), 1e9) == pytest.approx(15 / 16 / 4)
    late = replace(cluster, tiers=(_tier("node", 8, 1), _tier("system", 4, 0.5, 1.0)))
    assert gather_s(late, (8, 2), 1e9) == pytest.approx(7 / 8 + 1 + 1 / 8)
    assert ring_s(late, (8, 2), 1e9) == pytest.approx(15 + 15 / 16)


def test_a_group_across_nodes_has_one_rank_a_node() -> None:
    assert gather_s(PLAIN, (1, 4), 25e9) == pytest.approx(3 / 4)


@settings(deadline=None, max_examples=50)
@given(cluster=presets, inner=st.integers(1, 4), outer=st.integers(1, 2), num_bytes=sizes)
def test_collectives_are_consistent(cluster: Cluster, inner: int, outer: int, num_bytes: float) -> None:
    group = (min(inner, cluster.tiers[0].size), *[1] * (len(cluster.tiers) - 2), outer)
    seconds = gather_s(cluster, group, num_bytes)
    if math.prod(group) == 1:
        assert seconds == 0
        return
    assert gather_s(cluster, group, 2 * num_bytes) >= seconds
    outermost = max(tier for tier, degree in enumerate(group) if degree > 1)
    num_ranks = math.prod(group)
    fastest = cluster.tiers[0].bandwidth_bytes_per_s
    assert seconds >= (num_ranks - 1) / num_ranks * num_bytes / fastest
    assert seconds >= cluster.tiers[outermost].latency_s


def test_an_exchange_waits_for_each_tier_s_latency_once() -> None:
    assert exchange_tiers(PLAIN, (8, 4), []) == {}
    late = replace(PLAIN, tiers=(_tier("node", 8, 300, 1.0), _tier("system", 4, 25, 2.0)))
    found = exchange_tiers(late, (8, 4), [(0, 600 * 10**9), (1, 25 * 10**9)])
    assert found == pytest.approx({0: 1.0 + 2.0, 1: 2.0 + 1.0}, rel=1e-4)


def test_efficiency_and_half_size() -> None:
    tier = replace(PLAIN.tiers[0], efficiency=0.8, half_bytes=1e6)
    cluster = replace(PLAIN, tiers=(tier, PLAIN.tiers[1]))
    assert rate_bytes_per_s(cluster, 0, 1e6) == pytest.approx(0.4 * 300e9)
    assert rate_bytes_per_s(cluster, 0, 1e15) == pytest.approx(0.8 * 300e9)


def test_members_wired_in_pairs() -> None:
    direct = load_cluster("perlmutter")
    whole, pair = (rate_bytes_per_s(direct, 0, 1e9, degree=degree) for degree in (4, 2))
    assert whole == pytest.approx(3 * pair)
    switched = load_cluster("dgx-a100")
    assert rate_bytes_per_s(switched, 0, 1e9, degree=2) == rate_bytes_per_s(switched, 0, 1e9, degree=8)


@pytest.mark.parametrize("group", [(9,), (0,), (1, 5), (1, 1, 2)])
def test_groups_that_do_not_fit(group: tuple[int, ...]) -> None:
    with pytest.raises(ClusterError, match="a group"):
        gather_s(PLAIN, group, 1e6)


def test_nested_groups() -> None:
    frontier = load_cluster("frontier").resized(8)
    assert nested(frontier, 1, 8) == (2, 4, 1)
    assert nested(frontier, 2, 8) == (1, 4, 2)
    assert nested(frontier, 4, 8) == (1, 2, 4)
    assert nested(frontier, 8, 8) == (1, 1, 8)


def test_a_ring_over_all_devices_by_hand() -> None:
    """Two nodes of 8: 14 steps inside and one between, at the rate of NVLink or of 8 adapters, whichever is lower."""
    cluster = load_cluster("dgx-h100").resized(2)
    inside, between = (replace(tier, half_bytes=0.0) for tier in cluster.tiers)
    cluster = replace(cluster, tiers=(inside, between))
    size = 1e15  # so large that steps take no part of it
    links = [inside.bandwidth_bytes_per_s * inside.efficiency, 8 * between.bandwidth_bytes_per_s * between.efficiency]
    assert one_ring_s(cluster, (8, 2), size) == pytest.approx(15 / 16 * size / min(links))
    alone_s = one_ring_s(cluster, (8, 2), 1e-3)
    steps_s = 14 * inside.latency_s + between.latency_s
    assert alone_s == pytest.approx(steps_s + cluster.device.kernels.launch_s, rel=1e-3)
    assert one_ring_s(cluster, (1, 1), size) == one_ring_s(cluster, (8, 2), 0.0) == 0.0
