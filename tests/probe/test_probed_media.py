"""The media below the device of a probed cluster."""

from dataclasses import replace
from pathlib import Path

import pytest

from terrace.accelerator import HOST
from terrace.cluster.presets import load_cluster
from terrace.probe.below import NO_MEDIUM, MediumSample, with_medium
from terrace.probe.measure import measure_disk, measure_host
from terrace.probe.timing import Stopwatch
from terrace.runtime.kept.host_rate import update_rate
from tests.support.toys import cluster_of


def test_a_disk_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    found = measure_disk(Stopwatch(1, HOST), tmp_path, 1)
    assert 1e6 < found.bytes_per_s < 1e12
    assert 1e2 < found.pages_read_per_s < 1e8
    assert 1e2 < found.pages_written_per_s < 1e8
    assert found.free_bytes > 1e6
    assert not list(tmp_path.iterdir())
    assert measure_disk(Stopwatch(1, HOST), tmp_path / "missing", 1) == NO_MEDIUM


@pytest.mark.parametrize(("num_ranks", "shared_by", "sharers"), [(1, "", 1), (2, "package", 2), (8, "all", 8)])
def test_ranks_of_a_machine_share_its_disk(num_ranks: int, shared_by: str, sharers: int) -> None:
    start = cluster_of(2, 2, 2)
    sample = MediumSample(
        bytes_per_s=1e8, free_bytes=1e11, pages_read_per_s=1e4, pages_written_per_s=5e3, num_ranks=num_ranks
    )
    device = with_medium(start, start.device, "disk", sample)
    disk = replace(start, device=device).device.below["disk"]
    assert (disk.shared_by, disk.sharers) == (shared_by, sharers)
    assert disk.read_s(1e8) == disk.write_s(1e8) == pytest.approx(1.0), "what a rank reached is what it is given"
    assert disk.pages_read_s(1e4, 1.0) == pytest.approx(1.0)
    assert disk.pages_written_s(5e3, 1.0) == pytest.approx(1.0)
    assert disk.marks["read_bytes_per_s"] == disk.marks["write_pages_per_s"] == "measured"


def test_without_a_disk_the_file_keeps_its_own() -> None:
    start = load_cluster("workstation")
    assert with_medium(start, start.device, "disk", NO_MEDIUM) == start.device


def test_the_rate_of_updates_is_that_of_all_ranks_of_a_machine() -> None:
    start = cluster_of(2, 2, 2)
    sample = MediumSample(bytes_per_s=1e9, free_bytes=1e11, update_bytes_per_s=2e9, num_ranks=2)
    host = with_medium(start, replace(start.device, backend="cuda"), "host", sample).below["host"]
    assert host.update_bytes_per_s == 4e9
    assert host.marks["update_bytes_per_s"] == "measured"
    assert 1e8 < update_rate(1 << 18) < 1e13
    assert measure_host(Stopwatch(1, HOST), HOST, 1) == NO_MEDIUM, "a CPU's memory is the host's"
