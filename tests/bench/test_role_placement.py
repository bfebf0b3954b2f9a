"""The table of placements: its rows, and its findings on small and large clusters."""

import pytest

from bench.role_placement import cluster_of, flow_of, line, pools_words, row_of


def test_the_network_is_one_link_a_node() -> None:
    outer = cluster_of(16).tiers[1]
    assert outer.shared
    assert 8 * outer.bandwidth_bytes_per_s == 25e9
    assert cluster_of(16, 0.0).device.kernels.host_layer_s == 0


def test_what_has_no_room_says_so() -> None:
    row = row_of("34B", 8, None)
    assert set(row.found) == {"colocated", "split", "standalone", "best"}
    assert line(row) == "| 34B | 8 | no room | no room | no room | no room |  |  |"


@pytest.mark.nightly
def test_no_way_beats_the_best() -> None:
    row = row_of("7B", 8, None)
    best = row.found["best"]
    assert best is not None
    assert all(placed.seconds >= best.seconds for placed in row.found.values() if placed is not None)
    assert pools_words(best) == "8: actor, reference, critic, reward"
    assert f"| {best.seconds:.1f} | 0.0 + " in line(row)
    assert sum(role.model.scalar_head for role in flow_of("7B").roles) == 2


@pytest.mark.nightly
def test_small_clusters_share_all_devices_and_large_ones_part_them() -> None:
    """The finding of HybridFlow (2409.19256, section 8.3)."""
    small, large = row_of("7B", 16, None).found, row_of("7B", 128, None).found
    assert small["best"] is not None
    assert small["colocated"] is not None
    assert small["best"].placement == small["colocated"].placement
    assert large["best"] is not None
    assert large["colocated"] is not None
    assert len(large["best"].placement.pools) == 2
    assert large["best"].seconds < 0.99 * large["colocated"].seconds
