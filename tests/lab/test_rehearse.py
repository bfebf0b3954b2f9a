"""Rehearsals without a network: wiring, commands, names, refusals, counters, what is measured."""

import itertools
import math
import os
import re
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ClusterError, ConfigError
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.presets import load_cluster
from terrace.lab.rehearse import Wiring, script, wire
from terrace.lab.rehearse.counters import Counts, read
from terrace.lab.rehearse.guard import groups_left
from terrace.lab.rehearse.launch import rank_environment
from terrace.lab.rehearse.measure import Experiment, Way, experiments, figures
from terrace.lab.rehearse.names import Owner, leftovers, of_owner, owner_of, start_of, this_process
from terrace.lab.rehearse.tools import available_bytes, check_memory, check_rights
from tests.support.toys import cluster_of

LAB = wire(load_cluster("lab"), 1.0)


def _cluster(*tiers: tuple[int, float, bool], latency_s: float = 0.0) -> Cluster:
    """Tiers as (size, bandwidth, shared)."""
    made = tuple(
        Tier(name=f"tier{index}", size=size, bandwidth_bytes_per_s=rate, latency_s=latency_s, shared=shared)
        for index, (size, rate, shared) in enumerate(tiers)
    )
    return Cluster(name="test", device=cluster_of(2).device, tiers=made)


wirings = st.lists(st.tuples(st.integers(1, 3), st.just(1e7), st.booleans()), min_size=1, max_size=3).map(
    lambda tiers: wire(_cluster(*tiers), 1.0)
)


# Wiring


def test_the_lab() -> None:
    package, node, system = LAB.nets
    assert [net.rate_bytes_per_s for net in LAB.nets] == [math.inf, 1e8, 12.5e6]
    assert package.bridges == ("b0n0", "b0n1", "b0n2", "b0n3")
    assert [port.bridge for port in node.ports] == ["g1n0", "g1n0", "g1n1", "g1n1", "g1n2", "g1n2", "g1n3", "g1n3"]
    assert [(link.ranks, link.lower_bridge, link.upper_bridge) for link in system.uplinks] == [
        ((0, 1, 2, 3), "g2n0", "b2n0"),
        ((4, 5, 6, 7), "g2n1", "b2n0"),
    ]
    assert [LAB.between(0, other) for other in LAB.ranks] == [-1, 0, 1, 1, 2, 2, 2, 2]


def test_a_tier_that_is_not_shared_limits_every_rank() -> None:
    wiring = wire(_cluster((2, 4e7, False), (3, 1e7, False)), 0.5)
    assert [{port.rate_bytes_per_s for port in net.ports} for net in wiring.nets] == [{2e7}, {5e6}]
    assert not any(net.uplinks for net in wiring.nets)


def test_a_group_of_one_shares_with_nobody() -> None:
    net = wire(_cluster((2, 1e7, True)), 1.0).nets[0]
    assert (net.uplinks, net.rate_bytes_per_s) == ((), 1e7)


def test_scale_divides_latency_and_short_ones_are_the_kernels() -> None:
    cluster = _cluster((2, 1e7, False), latency_s=1e-4)
    assert wire(cluster, 1.0).nets[0].ports[0].delay_s == 0
    assert wire(cluster, 0.1).nets[0].ports[0].delay_s == pytest.approx(1e-3)
    assert wire(cluster, 0.1).nets[0].tier.latency_s == pytest.approx(1e-3)


@settings(deadline=None, max_examples=50)
@given(wirings)
def test_every_pair_meets_on_one_tier_and_its_bridges_are_trees(wiring: Wiring) -> None:
    for net in wiring.nets:
        edges = [(port.name, port.bridge) for port in net.ports]
        edges += [(link.lower_bridge, link.upper_bridge) for link in net.uplinks]
        islands = _components(edges)
        nodes = {end for edge in edges for end in edge}
        assert nodes >= set(net.bridges)
        assert len(edges) == len(nodes) - len(set(islands.values())), "a circle would let frames run for ever"
        for one, other in itertools.combinations(wiring.ranks, 2):
            if wiring.between(one, other) == net.index:
                assert islands[net.ports[one].name] == islands[net.ports[other].name]
    names = [name for net in wiring.nets for name in (*net.bridges, *(port.name for port in net.ports))]
    names += [name for net in wiring.nets for link in net.uplinks for name in (link.lower, link.upper)]
    assert len(names) == len(set(names))
    assert all(len(name) <= 15 for name in names), "the kernel takes no longer names"


def _components(edges: Iterable[tuple[str, str]]) -> dict[str, frozenset[str]]:
    """Return the component of each node."""
    found: dict[str, frozenset[str]] = {}
    for one, other in edges:
        whole = found.get(one, frozenset((one,))) | found.get(other, frozenset((other,)))
        found |= dict.fromkeys(whole, whole)
    return found


def test_addresses_differ_up_to_the_most_ranks() -> None:
    wiring = wire(_cluster((64, 1e7, False)), 1.0)
    assert len({wiring.address(rank) for rank in wiring.ranks}) == 64
    assert len({wiring.mac(rank, index) for rank in wiring.ranks for index in range(3)}) == 3 * 64


# Commands


def test_the_commands_of_a_rank() -> None:
    lines = script.rank_links(LAB, 1).splitlines()
    assert "address add 10.99.0.2/32 dev terrace0" in lines
    routes = {line.split()[2]: line.split()[4] for line in lines if line.startswith("route add")}
    assert routes == {
        "10.99.0.1/32": "t0",
        "10.99.0.3/32": "t1",
        "10.99.0.4/32": "t1",
        **{f"10.99.0.{number}/32": "t2" for number in (5, 6, 7, 8)},
    }
    assert sum(line.startswith("neigh add") for line in lines) == 7
    assert script.rank_limits(LAB, 1) == "", "shared and unlimited tiers limit nothing in a rank's own namespace"


def test_the_commands_of_the_fabric() -> None:
    limits = script.fabric_limits(LAB).splitlines()
    assert len(limits) == 2 * (4 + 2), "both ends of the uplinks of packages and nodes"
    assert "qdisc add dev u2n1 root tbf rate 100000000bit burst 32768b limit 67108864b" in limits
    links = script.fabric_links(LAB, {rank: f"space{rank}" for rank in LAB.ranks}).splitlines()
    assert sum(" type veth " in line for line in links) == 3 * 8 + 4 + 2
    assert sum(" netns space3" in line for line in links) == 3


def test_a_delay_is_added_once_on_the_way_out_with_the_limit() -> None:
    wiring = wire(_cluster((2, 1e7, False), latency_s=2e-3), 1.0)
    assert script.rank_limits(wiring, 0) == "qdisc add dev t0 root netem delay 2000us rate 80000000bit limit 100000\n"
    assert "netem" not in script.fabric_limits(wiring)
    assert script.window_bytes(wiring.nets[0]) == script.window_bytes(LAB.nets[1]) + 40_000


@pytest.mark.parametrize(("rate", "burst"), [(2e4, 32768), (1e8, 50_000), (1.4e9, 700_000)])
def test_bursts(rate: float, burst: int) -> None:
    assert script.burst_bytes(rate) == burst


# Names and leftovers


def test_names_tell_their_owner() -> None:
    owner = Owner(12, 3456)
    assert (owner.fabric, owner.rank(7)) == ("terrace-12-3456-fabric", "terrace-12-3456-r7")
    assert owner_of(owner.fabric) == owner_of(owner.rank(63)) == owner
    for name in ("terrace-12-3456", "terrace-12-3456-r7x", "xterrace-1-2-r3", "terrace-a-b-r0", "docker", "terrace"):
        assert owner_of(name) is None


def test_leftovers_are_those_of_the_dead_and_ours_only() -> None:
    alive, dead, reborn = Owner(10, 100), Owner(11, 100), Owner(12, 100)
    names = [alive.fabric, dead.fabric, dead.rank(0), reborn.rank(3), "cni-1234", "terrace-lookalike"]
    starts = {10: 100, 12: 999}  # 12 is another process by now
    assert leftovers(names, starts.get) == {dead: [dead.fabric, dead.rank(0)], reborn: [reborn.rank(3)]}
    assert of_owner(names, dead) == [dead.fabric, dead.rank(0)]


def test_this_process_is_alive() -> None:
    owner = this_process()
    assert owner.pid == os.getpid()
    assert leftovers([owner.fabric]) == {}
    assert start_of(2**22 + 1) is None


def test_the_guard_kills_what_was_started_and_not_ended() -> None:
    assert groups_left(["5\n", "6\n", "-5\n", "7"]) == {6, 7}
    assert groups_left(["5\n", "done\n"]) == set()
    assert groups_left(["5\n", "-"]) == {5}
    assert groups_left([]) == set()


# Refusals


@pytest.mark.parametrize("scale", [0.0, -0.5, float("nan"), float("inf")])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"--scale .* must be a number above 0"):
        wire(load_cluster("lab"), scale)


def test_too_slow_after_scaling() -> None:
    with pytest.raises(ClusterError, match=r"'system' at scale 1e-05 has 31.25 bytes/s.*--scale of at least 0\.006"):
        wire(replace(load_cluster("lab"), tiers=load_cluster("lab").tiers[2:]), 1e-5)


def test_too_many_ranks() -> None:
    with pytest.raises(ClusterError, match=r"has 65 ranks, and one machine emulates at most 64.*tiers\.tier0\.size"):
        wire(_cluster((65, 1e7, False)), 1.0)


def test_too_little_memory() -> None:
    check_memory(8, 3 * 10**9)
    with pytest.raises(ClusterError, match=r"8 ranks take about 2\.4 GB, and .* 2\.0 GB available: .* at most 6"):
        check_memory(8, 2 * 10**9)
    assert available_bytes() > 0


@pytest.mark.parametrize("capabilities", [0, 1 << 12, 1 << 21])
def test_without_rights(capabilities: int) -> None:
    with pytest.raises(ClusterError, match=r"needs root .* or add --paced"):
        check_rights(capabilities)
    check_rights(1 << 12 | 1 << 21)


# Environment


def test_a_rank_finds_its_world_as_under_torchrun() -> None:
    given = {"HOME": "/root", "RANK": "9", "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "3"}
    environment = rank_environment(LAB, 5, given)
    assert environment == {
        "HOME": "/root",
        "OMP_NUM_THREADS": "3",
        "CUDA_VISIBLE_DEVICES": "",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "5",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "10.99.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "terrace0",
    }


# Counters

NET_DEV = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed
    lo:     100       1    0    0    0     0          0         0      100       1    0    0    0     0       0          0
    t2:       7       1    0    0    0     0          0         0  3000000      20    0    0    0     0       0          0
terrace0:     0       0    0    0    0     0          0         0        0       0    0    0    0     0       0          0
    t0:12345678      10    0    0    0     0          0         0      222       2    0    0    0     0       0          0
"""  # noqa: E501


def test_a_rank_reads_its_own_counters(tmp_path: Path) -> None:
    (tmp_path / "dev").write_text(NET_DEV)
    assert read(tmp_path / "dev") == {0: 222, 2: 3_000_000}


def test_counts_are_of_the_ranks_and_uplinks() -> None:
    names = [port.name for net in LAB.nets for port in net.ports]
    names += [link.upper for net in LAB.nets for link in net.uplinks]
    before = Counts.of(dict.fromkeys(names, (10, 20)), LAB)
    after = Counts.of({**dict.fromkeys(names, (10, 20)), "p2r3": (110, 25), "d2n0": (112, 27)}, LAB)
    table = (after - before).table()
    assert list(table) == ["package", "node", "system"]
    assert table["package"]["uplinks"] == []
    assert table["system"] == {
        "interface": "t2",
        "sent_bytes": 100,
        "sent_bytes_by_rank": [0, 0, 0, 100, 0, 0, 0, 0],
        "received_bytes_by_rank": [0, 0, 0, 5, 0, 0, 0, 0],
        "uplinks": [
            {"ranks": [0, 1, 2, 3], "sent_bytes": 102, "received_bytes": 7},
            {"ranks": [4, 5, 6, 7], "sent_bytes": 0, "received_bytes": 0},
        ],
    }


# What is measured


def test_experiments_of_the_lab() -> None:
    made = experiments(LAB)
    assert [(one.index, one.way) for one in made if one.index != 1] == [
        (0, Way.LATENCY),
        (0, Way.PAIR),
        (0, Way.ALL_REDUCE),
        (2, Way.LATENCY),
        (2, Way.PAIR),
        (2, Way.UPLINK),
        (2, Way.ALL_REDUCE),
    ]
    uplink = next(one for one in made if one.index == 2 and one.way == Way.UPLINK)
    assert uplink.routes == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert made[-1].groups == ((0, 4), (1, 5), (2, 6), (3, 7))
    assert all(one.num_bytes % 8 == 0 for one in made)


def test_figures_compare_like_with_like() -> None:
    made = experiments(LAB)
    links, shares = (1e9, 1e8, 12.5e6), (1e9, 5e7, 3.125e6)

    def exact_s(one: Experiment) -> float:
        if one.way == Way.LATENCY:
            return 40 * 1e-4
        return one.num_bytes * max(len(one.routes), 1) / (links if one.routes else shares)[one.index]

    found = figures(LAB, [exact_s(one) for one in made])
    assert [figure.measured for figure in found if figure.way == Way.LATENCY] == pytest.approx([1e-4] * 3)
    limited = [figure for figure in found if figure.configured is not None]
    assert len(limited) == 6
    assert [figure.deviation for figure in limited] == pytest.approx([0.0] * 6, abs=1e-6)


def test_memory_for_no_rank_advises_none() -> None:
    with pytest.raises(ClusterError, match="free some of it"):
        check_memory(2, 1000)
    with pytest.raises(ClusterError, match="emulate at most") as caught:
        check_memory(100, 10**10)
    found = re.search(r"at most (\d+)", str(caught.value))
    assert found
    check_memory(int(found[1]), 10**10)


@pytest.mark.parametrize("name", ["ethernet", "frontier", "lab"])
def test_an_emulated_link_carries_the_shares_of_its_devices(name: str) -> None:
    cluster = load_cluster(name)
    shared = [net for net in wire(cluster, 0.01).nets if net.tier.shared]
    assert shared
    for net in shared:
        sharers = cluster.sharers(net.index)
        assert {len(uplink.ranks) for uplink in net.uplinks} == {sharers}
        link = 0.01 * sharers * cluster.tiers[net.index].bandwidth_bytes_per_s
        assert all(uplink.rate_bytes_per_s == pytest.approx(link) for uplink in net.uplinks)
