"""Rings over links of unequal pairs, and what many members cost: closed answers, bounds, refusals."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Tier
from terrace.cluster.presets import load_cluster
from terrace.cluster.width import Tree, share
from terrace.cluster.wiring import by_degree, num_links
from terrace.planner.stage_specs import data_cluster
from terrace.simulate.links import hop_s, rate_bytes_per_s
from tests.support.planner_cases import sized

FRONTIER = load_cluster("frontier").tiers[1].links


def test_rings_of_a_node_of_frontier() -> None:
    """RCCL's rings over the eight devices, model 52: two cycles in both directions; four devices have one cycle."""
    assert num_links(FRONTIER, tuple(range(8))) == 4
    assert (
        num_links(FRONTIER, (0, 1, 2, 3)) == num_links(FRONTIER, (0, 2, 4, 6)) == num_links(FRONTIER, (1, 3, 5, 7)) == 2
    )
    assert [num_links(FRONTIER, pair) for pair in ((0, 1), (0, 6), (0, 2))] == [4, 2, 1]
    assert num_links(FRONTIER, (0, 4)) == 1, "through a device in between"
    assert by_degree(FRONTIER, 2, 4) == (1, 1, 2)


@settings(deadline=None, max_examples=40)
@given(st.integers(3, 6), st.data())
def test_rings_are_the_most_that_trying_everything_finds(size: int, data: st.DataObject) -> None:
    pairs = list(itertools.combinations(range(size), 2))
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=len(pairs), max_size=len(pairs)))
    links = tuple((*pair, number) for pair, number in zip(pairs, numbers, strict=True) if number)
    cycles = {
        frozenset(frozenset(each) for each in itertools.pairwise((0, *order, 0)))
        for order in itertools.permutations(range(1, size))
    }

    def most(left: dict[frozenset[int], int], some: list[frozenset[frozenset[int]]]) -> int:
        found = 0
        for index, cycle in enumerate(some):
            if all(left.get(pair, 0) for pair in cycle):
                taken = {pair: number - (pair in cycle) for pair, number in left.items()}
                found = max(found, 1 + most(taken, some[index:]))
        return found

    left = {frozenset((one, other)): number for one, other, number in links}
    possible = [cycle for cycle in cycles if all(pair in left for pair in cycle)]
    assert num_links(links, tuple(range(size))) == max(1, 2 * most(left, possible))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("size", "number"), [(12, 1), (16, 1), (16, 4)])
def test_devices_that_are_all_wired_in_pairs(size: int, number: int) -> None:
    """A complete graph of n has (n - 1) // 2 disjoint cycles (Walecki, 1892); there are far too many to list."""
    links = tuple((one, other, number) for one, other in itertools.combinations(range(size), 2))
    found = num_links(links, tuple(range(size)))
    assert number * (size - 1) - found <= number * 2


@pytest.mark.timeout(60)
def test_wires_without_any_ring() -> None:
    """A grid with an odd number of devices has no cycle through all of them, and exponentially many paths."""
    side = 5
    links = [(side * row + column, side * row + column + 1, 1) for row in range(side) for column in range(side - 1)]
    links += [(side * row + column, side * (row + 1) + column, 1) for row in range(side - 1) for column in range(side)]
    assert num_links(tuple(links), tuple(range(side**2))) == 1


def test_a_part_of_a_node_keeps_its_links() -> None:
    cluster = load_cluster("frontier").resized(4)
    link = cluster.tiers[1].bandwidth_bytes_per_s * cluster.tiers[1].efficiency
    assert [rate_bytes_per_s(cluster, 1, 0, degree=degree) for degree in (2, 4, 0)] == [link, 2 * link, 2 * link]
    part = data_cluster(cluster, (1, 4, 2))
    assert rate_bytes_per_s(part, 1, 0, degree=4) == 2 * link
    assert rate_bytes_per_s(data_cluster(cluster, (2, 2, 1)), 1, 0, degree=2) == link


@pytest.mark.parametrize(
    ("links", "message"),
    [
        (((0, 0, 1),), r"tiers\.node\.links has \[0, 0, 1\]: give two devices"),
        (((0, 1, 0),), r"tiers\.node\.links has \[0, 1, 0\]"),
        (((0, 1, 1), (1, 0, 1)), r"tiers\.node\.links has devices 1 and 0 twice: add their links up"),
        (((0, 1, 101),), r"tiers\.node\.links has \[0, 1, 101\]: give at most 100 links of two devices"),
        (tuple((each, each + 1, 1) for each in range(7)), None),
        (FRONTIER[:4], r"tiers\.node\.links has no way from device 0 to device 2: add links between them"),
        (FRONTIER[:3], r"tiers\.node\.links joins device 6 to no other of the 8"),
    ],
)
def test_links_that_are_refused(links: tuple[tuple[int, int, int], ...], message: str | None) -> None:
    cluster = load_cluster("frontier")
    tiers = (cluster.tiers[0], replace(cluster.tiers[1], links=links, by_degree=()), *cluster.tiers[2:])
    if message is None:
        assert replace(cluster, tiers=tiers).tiers[1].by_degree == (1, 1, 1)
        return
    with pytest.raises(ClusterError, match=message):
        replace(cluster, tiers=tiers)
    with pytest.raises(ClusterError, match="direct has no effect beside links"):
        replace(cluster, tiers=(replace(cluster.tiers[1], direct=True),))


def test_contention_along_the_logarithm() -> None:
    points = ((32, 1.0), (512, 0.5))
    assert [share(points, degree) for degree in (2, 32, 512, 4096)] == [1.0, 1.0, 0.5, 0.5]
    assert share(points, 128) == pytest.approx(0.75)
    assert share((), 10**6) == 1.0
    cluster = load_cluster("dgx-h100").resized(512)
    few, many = (rate_bytes_per_s(cluster, 1, 1e9, degree=degree) for degree in (2, 512))
    assert many == pytest.approx(0.77 * few)
    assert rate_bytes_per_s(cluster, 1, 1e9) == many, "all members"


def test_a_message_takes_the_faster_algorithm() -> None:
    """By hand: 255 steps of a ring, or 8 of 4 us and 256 of 2.8 us at 0.75 of the rate."""
    cluster = load_cluster("alps").resized(256)
    system, tier = cluster.tiers[-1], len(cluster.tiers) - 1
    small, large = 1e4, 1e12
    assert hop_s(cluster, tier, 256, small) == pytest.approx(
        8 * 4e-6 + 256 * 2.8e-6 + small / (0.75 * rate_bytes_per_s(cluster, tier, small * 256 / 255))
    )
    assert hop_s(cluster, tier, 256, large) == pytest.approx(
        255 * 14e-6 + large / rate_bytes_per_s(cluster, tier, large * 256 / 255)
    )
    rings = replace(cluster, tiers=(*cluster.tiers[:-1], replace(system, tree=None)))
    assert hop_s(rings, tier, 256, small) > 4 * hop_s(cluster, tier, 256, small)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(["dgx-h100", "ethernet", "frontier", "perlmutter"]), st.floats(1, 1e10), st.integers(1, 9))
def test_wider_and_larger_messages_never_take_less(name: str, num_bytes: float, exponent: int) -> None:
    cluster = load_cluster(name).resized(1024)
    tier, degree = len(cluster.tiers) - 1, 2**exponent
    seconds = hop_s(cluster, tier, degree, num_bytes)
    # A rank of a wider message sends a larger part of it.
    wider = num_bytes * (2 * degree - 1) / (2 * degree) * degree / (degree - 1) if degree > 1 else num_bytes
    assert hop_s(cluster, tier, 2 * degree, wider) >= seconds
    assert hop_s(cluster, tier, degree, 2 * num_bytes) >= seconds


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tree": Tree(share=0.0, step_s=1e-6)}, r"tree\.share = 0\.0 must lie above 0"),
        ({"tree": Tree(share=0.5, step_s=-1.0)}, r"tree\.step_s = -1\.0"),
        ({"tree": Tree(share=0.5, step_s=1.0, member_s=math.inf)}, r"tree\.member_s = inf"),
        ({"contention": ((32, 1.0), (16, 0.5))}, r"contention has \[16, 0\.5\] behind \[32, 1\.0\]"),
        ({"contention": ((32, 0.5), (64, 0.6))}, r"contention has \[64, 0\.6\]"),
        ({"contention": ((32, 0.0),)}, r"contention has \[32, 0\.0\]"),
    ],
)
def test_width_that_is_refused(more: dict[str, object], message: str) -> None:
    tier = Tier(name="system", size=2, bandwidth_bytes_per_s=1e9, latency_s=1e-5, **more)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match=message):
        replace(load_cluster("dgx-h100"), tiers=(tier,))


def test_data_ranks_of_a_tier_that_is_wired_in_pairs_reach_less_of_it() -> None:
    cluster = sized("frontier", 2, 4, 2)
    direct = replace(
        cluster,
        tiers=tuple(replace(tier, direct=tier.name == "node", links=(), by_degree=()) for tier in cluster.tiers),
    )
    assert data_cluster(cluster, (2, 2, 2)).tiers[1].bandwidth_bytes_per_s == cluster.tiers[1].bandwidth_bytes_per_s
    assert data_cluster(direct, (2, 2, 2)).tiers[1].bandwidth_bytes_per_s == pytest.approx(
        cluster.tiers[1].bandwidth_bytes_per_s / 3
    )
    assert data_cluster(direct, (2, 4, 2)).tiers[1].bandwidth_bytes_per_s == cluster.tiers[1].bandwidth_bytes_per_s
