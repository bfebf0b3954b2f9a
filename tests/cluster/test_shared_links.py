"""Shares of links that devices share: they follow the sizes that an override gives."""

from typing import Any

import pytest

from terrace.base.errors import ClusterError
from terrace.cli.overrides import parse_overrides, read_cluster
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import lay_over, load_cluster, parse_cluster
from tests.support.planning import Planning, here

__all__ = ["here"]

PORT = 3.125e9  # 25 Gb/s, of a server of the preset ethernet


def overridden(name: str, *words: str) -> Cluster:
    return read_cluster(name, words, "")


def rate(cluster: Cluster, tier: str) -> float:
    return cluster.tiers[cluster.index(tier)].bandwidth_bytes_per_s


@pytest.mark.parametrize(("size", "share"), [(1, PORT), (2, PORT / 2), (8, PORT / 8), (16, PORT / 16)])
def test_a_link_is_shared_by_as_many_devices_as_are_left(size: int, share: float) -> None:
    cluster = overridden("ethernet", "--cluster.tiers.node.size", str(size))
    assert rate(cluster, "system") == pytest.approx(share)
    assert cluster.sharers(1) == size
    assert rate(cluster, "node") == rate(load_cluster("ethernet"), "node")


def test_the_link_of_a_package_is_no_faster_with_fewer_packages() -> None:
    frontier = load_cluster("frontier")
    assert frontier.sharers(2) == 2
    assert rate(overridden("frontier", "--cluster.tiers.node.size", "1"), "system") == rate(frontier, "system")
    assert rate(overridden("frontier", "--cluster.tiers.package.size", "1"), "system") == 2 * rate(frontier, "system")


def test_a_bandwidth_that_is_given_is_the_share() -> None:
    words = ("--cluster.tiers.node.size", "1", "--cluster.tiers.system.bandwidth_bytes_per_s", "1e9")
    assert rate(overridden("ethernet", *words), "system") == 1e9
    assert rate(overridden("ethernet", "--cluster.tiers.system.size", "64"), "system") == PORT / 8


def test_links_of_all_tiers_follow() -> None:
    lab, cluster = load_cluster("lab"), overridden("lab", "--cluster.tiers.package.size", "1")
    assert rate(cluster, "node") == 2 * rate(lab, "node")
    assert rate(cluster, "system") == 2 * rate(lab, "system")


def test_a_written_plan_follows_an_override_too(here: Planning) -> None:
    assert here.say("plan", "--nodes", "2", "--axes", "data", cluster="ethernet")[0] == 0
    one = here.call("simulate", "plan.toml", "--plan.stages", "[]", "--cluster.tiers.node.size", "1")
    assert one.code == 0
    assert "3.12 GB/s" in one.out
    assert "shared by" not in one.out
    assert "391 MB/s, 45 us, shared by 8" in here.call("simulate", "plan.toml").out


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shared_by": "rack", "shared": True}, "no tier inside 'system'; known: node"),
        ({"shared_by": "node", "shared": False}, "has no effect without shared = true"),
    ],
)
def test_a_tier_that_no_devices_share_is_refused(changes: dict[str, Any], said: str) -> None:
    table = {"cluster": {"name": "mine", "device": _device(), "tiers": [_tier("node"), _tier("system") | changes]}}
    with pytest.raises(ClusterError, match=said):
        parse_cluster(lay_over(table, {})["cluster"])


def test_tables_that_no_cluster_has_are_left_to_its_check() -> None:
    tiers = [_tier("node") | {"size": "8"}, _tier("system") | {"shared": True}]
    own = parse_overrides(["--cluster.tiers.node.size", "1"])
    assert lay_over({"cluster": {"tiers": tiers}}, own)["cluster"]["tiers"][1] == tiers[1]
    assert lay_over({"cluster": "ethernet"}, {"cluster": 3}) == {"cluster": 3}


def _device() -> dict[str, Any]:
    peaks = {"bf16": 1e12}
    return {"name": "x", "memory_bytes": 1e9, "memory_bandwidth_bytes_per_s": 1e9, "peak_flops_per_s": peaks}


def _tier(name: str) -> dict[str, Any]:
    return {"name": name, "size": 4, "bandwidth_bytes_per_s": 1e9, "latency_s": 0.0}
