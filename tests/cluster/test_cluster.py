"""Clusters: the presets, the numbering of ranks, the refusals, and the documentation's table."""

import math
import random
import re
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ClusterError, ConfigError, TerraceError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster, Device, Kernels, Tier, expected_most
from terrace.cluster.presets import load_cluster, parse_cluster, preset_names

DOC = Path(__file__).parents[2] / "docs" / "clusters.md"

DEVICE = Device(name="device", memory_bytes=1e9, memory_bandwidth_bytes_per_s=1e9, peak_flops_per_s={"fp32": 1e9})

# World size and GB/s of one device by tier, from the public figures: see the `source` of each tier.
EXPECTED: dict[str, tuple[int, list[float]]] = {
    "alps": (8, [450, 200 / 8]),
    "dgx-a100": (16, [600 / 2, 200 / 8]),
    "dgx-b200": (16, [1800 / 2, 400 / 8]),
    "dgx-h100": (16, [900 / 2, 400 / 8]),
    "dgx-h200": (16, [900 / 2, 400 / 8]),
    "ethernet": (16, [32, 25 / 8 / 8]),
    "frontier": (16, [4 * 50, 50, 4 * 200 / 8 / 8]),
    "gb200-nvl72": (144, [1800 / 2, 1800 / 2, 400 / 8]),
    "lab": (8, [1.5, 100 / 1e3 / 2, 12.5 / 1e3 / 4]),
    "laptop": (1, [16]),
    "local": (8, [0.2, 0.2, 0.2]),
    "mi300x": (16, [7 * 64, 400 / 8]),
    "pcie-a100": (16, [32, 200 / 8 / 8]),
    "perlmutter": (8, [600 / 2, 200 / 8]),
    "workstation": (1, [32]),
}

TOML = """
name = "small"
[device]
name = "card"
memory_bytes = 1e9
memory_bandwidth_bytes_per_s = 1e9
peak_flops_per_s = { fp32 = 1e9 }
[[tiers]]
name = "node"
size = 4
bandwidth_bytes_per_s = 1e9
latency_s = 1e-6
"""


def _cluster(*sizes: int) -> Cluster:
    tiers = tuple(
        Tier(name=f"tier{index}", size=size, bandwidth_bytes_per_s=1e9, latency_s=0.0)
        for index, size in enumerate(sizes)
    )
    return Cluster(name="test", device=DEVICE, tiers=tiers)


clusters = st.lists(st.integers(1, 5), min_size=1, max_size=5).map(lambda sizes: _cluster(*sizes))


# Presets


def test_every_preset_has_an_expectation() -> None:
    assert preset_names() == sorted(EXPECTED)


@pytest.mark.parametrize("name", preset_names())
def test_preset_sizes_and_bandwidths(name: str) -> None:
    cluster = load_cluster(name)
    world_size, gigabytes = EXPECTED[name]
    assert cluster.name == name
    assert cluster.world_size == world_size
    assert [tier.bandwidth_bytes_per_s / 1e9 for tier in cluster.tiers] == pytest.approx(gigabytes)
    assert cluster.tiers[-1].size == min(2, world_size)


@pytest.mark.parametrize("name", preset_names())
def test_preset_figures_are_in_si_units(name: str) -> None:
    """A figure in bits, in GB or in microseconds would fall outside these ranges."""
    cluster = load_cluster(name)
    device = cluster.device
    bandwidths = [tier.bandwidth_bytes_per_s for tier in cluster.tiers]
    latencies = [tier.latency_s for tier in cluster.tiers]
    assert bandwidths == sorted(bandwidths, reverse=True), "no tier is faster than the one inside it"
    assert latencies == sorted(latencies), "no tier is nearer than the one inside it"
    least = 1e6 if name == "lab" else 1e8  # made slow, so that one machine can emulate it
    assert all(least <= bandwidth <= 1e12 for bandwidth in bandwidths)
    assert bandwidths[0] <= device.memory_bandwidth_bytes_per_s
    assert all(1e-6 <= latency <= 1e-3 for latency in latencies)
    assert 1e9 <= device.memory_bytes <= 1e12
    assert {"bf16", "fp32", "fp64"} <= set(device.peak_flops_per_s)
    assert device.peak_flops_per_s["fp64"] <= device.peak_flops_per_s["fp32"]
    assert all(1e9 <= peak <= 1e16 for peak in device.peak_flops_per_s.values())


@pytest.mark.parametrize("name", preset_names())
def test_preset_states_its_sources(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.device.source
    assert all(tier.source for tier in cluster.tiers)


# Ranks and coordinates


@given(clusters)
def test_coordinates_are_a_bijection_with_the_innermost_tier_fastest(cluster: Cluster) -> None:
    ranks = range(cluster.world_size)
    positions = [cluster.coordinates(rank) for rank in ranks]
    assert len(positions) == math.prod(tier.size for tier in cluster.tiers)
    assert positions == sorted(set(positions), key=lambda position: position[::-1])
    assert [cluster.rank(position) for position in positions] == list(ranks)


@given(clusters)
def test_peers_partition_the_world_in_tier_order(cluster: Cluster) -> None:
    world = range(cluster.world_size)
    for index, tier in enumerate(cluster.tiers):
        groups = {cluster.peers(rank, index) for rank in world}
        assert sorted(rank for group in groups for rank in group) == list(world)
        for group in groups:
            assert [cluster.coordinates(rank)[index] for rank in group] == list(range(tier.size))
            assert len({_without(cluster.coordinates(rank), index) for rank in group}) == 1


@given(clusters)
def test_a_tier_group_holds_the_groups_inside_it(cluster: Cluster) -> None:
    assert cluster.ranks_within(-1) == 1
    for index, tier in enumerate(cluster.tiers):
        assert cluster.ranks_within(index) == cluster.ranks_within(index - 1) * tier.size
    assert cluster.ranks_within(len(cluster.tiers) - 1) == cluster.world_size


@given(clusters)
def test_a_device_has_no_peer_but_itself(cluster: Cluster) -> None:
    assert cluster.index("device") == -1
    assert all(cluster.peers(rank, -1) == (rank,) for rank in range(cluster.world_size))


def test_numbering_of_the_module_docstring() -> None:
    cluster = _cluster(2, 4)
    assert cluster.coordinates(5) == (1, 2)
    assert cluster.peers(5, 0) == (4, 5)
    assert cluster.peers(5, 1) == (1, 3, 5, 7)


@pytest.mark.parametrize("rank", [-1, 8])
def test_rank_outside_the_world(rank: int) -> None:
    cluster = _cluster(2, 4)
    with pytest.raises(ClusterError, match=rf"rank {rank} is outside 0\.\.7"):
        cluster.coordinates(rank)
    with pytest.raises(ClusterError):
        cluster.peers(rank, -1)


@pytest.mark.parametrize("coordinates", [(2, 0), (0, 4), (-1, 0), (0,), (0, 0, 0)])
def test_coordinates_outside_the_tiers(coordinates: tuple[int, ...]) -> None:
    with pytest.raises(ClusterError, match=r"sizes \(2, 4\)"):
        _cluster(2, 4).rank(coordinates)


@given(clusters, st.integers(1, 100))
def test_resized_changes_the_outermost_tier_only(cluster: Cluster, size: int) -> None:
    resized = cluster.resized(size)
    assert resized.tiers[:-1] == cluster.tiers[:-1]
    assert resized.tiers[-1] == replace(cluster.tiers[-1], size=size)
    assert (resized.name, resized.device) == (cluster.name, cluster.device)


def test_clusters_are_values() -> None:
    first, second = load_cluster("frontier"), load_cluster("frontier")
    assert first == second
    assert hash(first) == hash(second)
    assert first != first.resized(3)


# Refusals


def test_cluster_without_tiers() -> None:
    with pytest.raises(ClusterError, match="no tiers"):
        _cluster()


@pytest.mark.parametrize("size", [0, -1])
def test_tier_size_below_one(size: int) -> None:
    with pytest.raises(ClusterError, match=f"'tier1' has size {size}"):
        _cluster(2, size)
    with pytest.raises(ClusterError, match=f"size {size}"):
        _cluster(2, 2).resized(size)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_figures_that_must_be_positive(value: float) -> None:
    tier = _cluster(2).tiers[0]
    with pytest.raises(ClusterError, match="'tier0' has bandwidth"):
        Cluster(name="test", device=DEVICE, tiers=(replace(tier, bandwidth_bytes_per_s=value),))
    devices = {
        "memory_bytes": replace(DEVICE, memory_bytes=value),
        "memory_bandwidth_bytes_per_s": replace(DEVICE, memory_bandwidth_bytes_per_s=value),
        "peak_flops_per_s.fp32": replace(DEVICE, peak_flops_per_s={"fp32": value}),
    }
    for key, device in devices.items():
        with pytest.raises(ClusterError, match=rf"device\.{key} = "):
            Cluster(name="test", device=device, tiers=(tier,))


@pytest.mark.parametrize("latency_s", [-1e-9, math.nan, math.inf])
def test_latency_that_cannot_be(latency_s: float) -> None:
    tier = replace(_cluster(2).tiers[0], latency_s=latency_s)
    with pytest.raises(ClusterError, match="'tier0' has latency"):
        Cluster(name="test", device=DEVICE, tiers=(tier,))


def test_device_without_peaks() -> None:
    with pytest.raises(ClusterError, match="peak_flops_per_s is empty"):
        Cluster(name="test", device=replace(DEVICE, peak_flops_per_s={}), tiers=_cluster(2).tiers)


@pytest.mark.parametrize("name", ["device", "", "a.b", "a b", "a=b", "node\n"])
def test_tier_names_that_cannot_be(name: str) -> None:
    tier = replace(_cluster(2).tiers[0], name=name)
    with pytest.raises(ClusterError, match="cannot be called"):
        Cluster(name="test", device=DEVICE, tiers=(tier,))


def test_two_tiers_of_one_name() -> None:
    tier = _cluster(2).tiers[0]
    with pytest.raises(ClusterError, match="two tiers are called 'tier0'"):
        Cluster(name="test", device=DEVICE, tiers=(tier, tier))


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(ClusterError, match="did you mean 'package'"):
        load_cluster("frontier").index("pakage")
    with pytest.raises(ClusterError, match="did you mean 'frontier'"):
        load_cluster("fronteir")


@pytest.mark.parametrize("name", ["", "zzz", "z" * 10_000, "z\0z"])
def test_unknown_preset_lists_the_known(name: str) -> None:
    with pytest.raises(ClusterError, match="known: alps, "):
        load_cluster(name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"tiers = [", "not valid TOML"),
        (b'name = "caf\xe9"', "not UTF-8"),
        (b"tiers = " + b"[" * 100_000, "not valid TOML"),
        (b'name = "x"', r"cluster\.tiers must be a list"),
        (b'name = "x"\n[tiers]\nname = "node"', r"cluster\.tiers must be a list"),
        (b'name = "x"\ntiers = [1]', r"cluster\.tiers\[0\] must be a table"),
        (
            TOML.encode() + b"bandwith_bytes_per_s = 1\n",
            r"unknown key cluster\.tiers\[0\]\.bandwith_bytes_per_s",
        ),
        (
            TOML.replace("size = 4", "size = 4.0").encode(),
            r"cluster\.tiers\[0\]\.size = 4\.0 must be of type int",
        ),
        (TOML.replace("size = 4", "").encode(), r"cluster\.tiers\[0\]\.size is missing"),
        (TOML.replace("fp32 = 1e9", 'fp32 = "1e9"').encode(), r"cluster\.device\.peak_flops_per_s\.fp32"),
        (TOML.replace("memory_bytes = 1e9", "memory_bytes = -1").encode(), r"device\.memory_bytes = -1\.0"),
        (TOML.replace("memory_bytes = 1e9", "memory_bytes = 80").encode(), r"80\.0 .* in bytes, not GB"),
        (TOML.replace("fp32 = 1e9", "fp32 = 1e30").encode(), r"1e\+30 .* in FLOP/s, not TFLOP/s"),
    ],
)
def test_file_that_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_bytes(content)
    with pytest.raises(TerraceError, match=message):
        load_cluster(str(path))


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_cluster(str(tmp_path / "missing.toml"))
    with pytest.raises(ConfigError, match="directory"):
        load_cluster(str(tmp_path))


def test_own_file(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(TOML, encoding="utf-8")
    assert load_cluster(str(path)) == parse_cluster(tomllib.loads(TOML))


# The documentation


def test_documented_example_is_what_the_text_says() -> None:
    found = re.search(r"```toml\n(.*?)```", DOC.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert found is not None
    cluster = parse_cluster(tomllib.loads(found[1]))
    assert cluster.world_size == 12
    assert cluster.coordinates(5) == (1, 1)


def test_documented_table_is_the_presets() -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    expected = [[f"`{name}`", load_cluster(name).device.name, _tiers(name)] for name in preset_names()]
    assert [row[:3] for row in rows] == expected
    assert all(len(row) == 4 and row[3] for row in rows), "every row names its sources"


def test_the_slowest_device_sets_the_pace() -> None:
    """The mean of the largest of 8, 64 and 512 normal values, from 20,000 draws; kept through resizing and copies."""
    draw = random.Random(0)
    for number, draws in ((8, 20000), (64, 4000), (512, 1000)):
        mean = fmean(max(draw.gauss() for _ in range(number)) for _ in range(draws))
        assert expected_most(number) == pytest.approx(mean, rel=0.02)
    assert expected_most(1) == 0.0
    assert expected_most(10**30) == expected_most(10**12) > expected_most(10**6)
    cluster = load_cluster("dgx-h100")
    assert cluster.resized(64).device.pace == pytest.approx(1 / (1 + 0.015 * expected_most(512)))
    assert cluster.resized(64).resized(2) == cluster == parse_cluster(dump(cluster))
    assert "pace" not in dump(cluster)["device"]
    assert replace(cluster.resized(1), around=16).device == cluster.device, "a part keeps the pace of the whole"
    assert replace(cluster, device=replace(cluster.device, spread=0.0)).device.pace == 1.0
    with pytest.raises(ClusterError, match=r"device\.spread = 1\.5"):
        replace(cluster, device=replace(cluster.device, spread=1.5))


def test_documented_reach_is_the_presets() -> None:
    lines = DOC.read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {row[0]: row[1:] for row in cells if len(row) == 6}
    assert [name for name in found if name in preset_names()] == [
        name for name in preset_names() if load_cluster(name).device.kernels != Kernels()
    ]
    for name in set(found) & set(preset_names()):
        cluster = load_cluster(name)
        kernels = cluster.device.kernels
        reach = ", ".join(f"{t.name} {t.efficiency:g} at {t.half_bytes / 1e6:g} MB" for t in cluster.tiers)
        products = f"{kernels.gemm:g}, {kernels.gemm_half_depth:g}"
        attention = f"{kernels.attention:g} / {kernels.attention_backward or kernels.attention:g}"
        assert found[name][:4] == [products, f"{kernels.memory:g}", attention, reach]
        assert kernels.source
        assert found[name][4]


def _tiers(name: str) -> str:
    cluster = load_cluster(name)
    return ", ".join(
        f"{tier.name} {tier.size} x {tier.bandwidth_bytes_per_s / 1e9:g}"
        f"{f' shared by {cluster.sharers(index)}' if tier.shared else ''}"
        for index, tier in enumerate(cluster.tiers)
    )


def _without(position: tuple[int, ...], index: int) -> tuple[int, ...]:
    return position[:index] + position[index + 1 :]


def test_presets_of_gpus_say_their_power_and_none_takes_a_power_station() -> None:
    for name in preset_names():
        device = load_cluster(name).device
        assert (device.power_watts > 0) == (device.type == "cuda"), name
    cluster = load_cluster("dgx-a100")
    with pytest.raises(ClusterError, match=r"power_watts = 2000000.0 must lie between 0"):
        replace(cluster, device=replace(cluster.device, power_watts=2e6))
