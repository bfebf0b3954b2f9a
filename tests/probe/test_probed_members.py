"""A probe of a cluster whose members differ: their speeds over the mean, on ranks and assembled."""

from dataclasses import replace

import pytest
import torch

from terrace.cluster.members import Member
from terrace.cluster.presets import load_cluster
from terrace.launch.start import LocalPool, World
from terrace.probe.assemble import assemble
from terrace.probe.members import with_speeds
from terrace.probe.sustained import measure_speeds
from terrace.probe.timing import Stopwatch
from tests.support.probed import synthetic
from tests.support.toys import cluster_of


def test_speeds_are_over_the_mean_of_seconds() -> None:
    *_, tier = cluster_of(2, 2).tiers
    fast, slow = with_speeds(tier, (4.0, 4.0, 2.0, 2.0)).members
    assert (fast.speed, slow.speed) == pytest.approx((1.5, 0.75))  # harmonic mean of 4 and 2: 8 / 3
    assert with_speeds(tier, ()) is tier


def test_a_probed_cluster_has_the_measured_speeds() -> None:
    cluster = load_cluster("dgx-a100").resized(2)
    *inner, tier = cluster.tiers
    start = replace(cluster, tiers=(*inner, replace(tier, members=(Member(speed=9.0), Member()))))
    probed = assemble(start, replace(synthetic(cluster), rates=(3.0,) * 8 + (1.0,) * 8))
    assert [each.speed for each in probed.cluster.tiers[-1].members] == pytest.approx([2.0, 2 / 3])
    assert {row.name: row.now for row in probed.rows}["speed of member 0"] == pytest.approx(2.0)
    assert assemble(cluster, synthetic(cluster)).cluster.tiers[-1].members == ()


def _rates(world: World) -> tuple[float, ...]:
    torch.set_num_threads(1)
    return measure_speeds(Stopwatch(world.world_size, torch.device("cpu")), "fp32", 0.05)


def test_every_rank_knows_the_rates_of_all(pool: LocalPool) -> None:
    found = pool.run(2, _rates, timeout_s=60.0)
    assert found[0] == found[1]
    assert len(found[0]) == 2
    assert min(found[0]) > 0
