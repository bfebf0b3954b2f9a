"""AMD's devices are planned and predicted as torch treats them: like CUDA's with the same figures."""

from dataclasses import replace

import pytest

from terrace.cluster.cluster import Device
from terrace.cluster.presets import load_cluster
from terrace.planner.search import find
from terrace.planner.space import Space
from tests.support.planner_cases import CLUSTERS, small_task

MI250X = CLUSTERS["frontier 2x1x2"].device
MI300X = load_cluster("mi300x").device


@pytest.mark.parametrize("device", [MI250X, MI300X], ids=lambda device: str(device.name))
def test_plans_do_not_depend_on_the_vendor(device: Device) -> None:
    assert (device.backend, device.type) == ("rocm", "cuda")
    cluster = CLUSTERS["frontier 2x1x2"]
    ours, others = (
        find(Space(task=small_task(replace(cluster, device=each))))[0].best
        for each in (device, replace(device, backend="cuda"))
    )
    assert len(ours) == 5
    assert ours == others
