"""`[[tiers.members]]`: what is read, what is refused, and the clusters that they stand for."""

from dataclasses import replace
from typing import Any

import pytest

from terrace.base.errors import ClusterError, ConfigError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import Member, slowed
from terrace.cluster.presets import load_cluster, parse_cluster
from tests.support.toys import cluster_of


def table(*members: dict[str, Any], size: int = 2) -> dict[str, Any]:
    found: dict[str, Any] = dump(cluster_of(2, size))
    found["tiers"][-1]["members"] = list(members)
    return found


def test_a_table_says_device_speed_and_link() -> None:
    h100 = load_cluster("dgx-h100").device
    cpus = load_cluster("lab").device
    assert h100.backend != cpus.backend
    fast, slow = parse_cluster(
        table({"speed": 2}, {"speed": 0.5, "bandwidth_bytes_per_s": 1e6, "latency_s": 1.0})
    ).alike
    own = cluster_of(2, 2).device
    for (cluster, count), speed in ((fast, 2), (slow, 0.5)):
        assert count == 1
        assert cluster.tiers[-1].members == ()
        assert cluster.device.peak_flops_per_s["fp32"] == speed * own.peak_flops_per_s["fp32"]
        assert cluster.device.memory_bandwidth_bytes_per_s == speed * own.memory_bandwidth_bytes_per_s
        # The slower end of a link counts.
        assert (cluster.tiers[-1].bandwidth_bytes_per_s, cluster.tiers[-1].latency_s) == (1e6, 1.0)
    mixed = dump(load_cluster("dgx-a100").resized(3))
    mixed["tiers"][-1]["members"] = [{"count": 2}, {"device": "dgx-h100"}]
    cluster = parse_cluster(mixed)
    assert [(each.device.name, count) for each, count in cluster.alike] == [("NVIDIA A100 SXM 80GB", 2), (h100.name, 1)]
    assert parse_cluster(dump(cluster)) == cluster
    assert slowed(h100, 1) is h100


def test_the_least_memory_is_that_of_all() -> None:
    """Whichever member a plan is searched for, it has the room of all, with the headroom of the cluster."""
    own = replace(cluster_of(2, 2).device, headroom="30%")
    small, large = (replace(own, memory_bytes=each, headroom="10%") for each in (1e9, 1e14))
    tiers = cluster_of(2, 2).tiers
    members = (Member(count=2), Member(device=small), Member(device=large))
    cluster = replace(cluster_of(2, 2), device=own, tiers=(tiers[0], replace(tiers[1], size=4, members=members)))
    assert cluster.device.memory_bytes == 1e9
    assert [each.device.usable_bytes for each, _ in cluster.alike] == [pytest.approx(0.7e9)] * 3


def test_alike_members_are_the_cluster_itself() -> None:
    cluster = cluster_of(2, 2)
    assert cluster.alike == ((cluster, 2),)


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ([{}], r"tiers.node.members describe 1 member, and tier 'node' has size 2: give a table for each"),
        ([{"count": 3}], r"describe 3 members, and tier 'node' has size 2"),
        ([{"speed": 0}, {}], r"members\[0\].speed = 0(.0)? must be a positive number"),
        ([{}, {"speed": -1.0}], r"members\[1\].speed = -1.0 must be a positive number"),
        ([{"count": 0}, {"count": 2}], r"members\[0\].count = 0: a table describes 1 member or more"),
        ([{"bandwidth_bytes_per_s": 0}, {}], r"members\[0\].bandwidth_bytes_per_s = 0(.0)?: give a positive number"),
        ([{"latency_s": -1}, {}], r"members\[0\].latency_s = -1(.0)?: give zero or up to"),
        ([{"device": "dgx-h100"}, {}], r"members\[0\].device has backend 'cuda' and the cluster's device 'cpu'"),
        ([{"device": "dgx-h1000"}, {}], r"no cluster preset or file 'dgx-h1000'; did you mean"),
        ([{"rate": 1}, {}], r"unknown key cluster.tiers\[1\].members\[0\].rate"),
    ],
)
def test_a_table_that_is_no_member_is_refused(members: list[dict[str, Any]], words: str) -> None:
    with pytest.raises((ClusterError, ConfigError), match=words):
        parse_cluster(table(*members))


def test_only_members_of_the_outermost_tier_differ() -> None:
    found = dump(cluster_of(2, 2))
    found["tiers"][0]["members"] = [{"count": 2}]
    with pytest.raises(ClusterError, match=r"tiers.package.members has no effect"):
        parse_cluster(found)


def test_a_smaller_cluster_has_the_first_members() -> None:
    cluster: Cluster = parse_cluster(table({"speed": 2}, {}))
    assert cluster.resized(1).tiers[-1].members == (Member(speed=2.0),)
    three = parse_cluster(table({"speed": 2}, {"count": 3}, size=4)).resized(3)
    assert three.tiers[-1].members == (Member(speed=2.0), Member(count=2))
    with pytest.raises(ClusterError, match="describe 2 members, and tier 'node' has size 3"):
        cluster.resized(3)


def test_a_member_that_is_gone_bounds_no_memory() -> None:
    """The last of three has half of the others' memory."""
    whole = cluster_of(2, 3)
    small = replace(whole.device, memory_bytes=whole.device.memory_bytes / 2)
    *inner, tier = whole.tiers
    mixed = replace(whole, tiers=(*inner, replace(tier, members=(Member(count=2), Member(device=small)))))
    assert mixed.device.memory_bytes == small.memory_bytes
    assert mixed.resized(3) == mixed
    assert mixed.resized(2).device.memory_bytes == whole.device.memory_bytes
    first = replace(whole, tiers=(*inner, replace(tier, members=(Member(device=small), Member(count=2)))))
    assert first.resized(2).device.memory_bytes == small.memory_bytes
