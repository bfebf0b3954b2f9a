"""Two tiers at once: the share of a bus is found again, and real ranks time both."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from terrace.cluster.cluster import Cluster
from terrace.comm.pace import UNPACED
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.probe.fit import bus_share
from terrace.probe.links import TierLinks
from terrace.probe.measure import measure_pair
from terrace.probe.samples import PairSample
from terrace.probe.timing import Stopwatch
from tests.support.toys import cluster_of


@given(one_s=st.floats(0.1, 10), other_s=st.floats(0.1, 10), share=st.floats(0.101, 1))
def test_the_share_of_a_bus_is_found_again(one_s: float, other_s: float, share: float) -> None:
    seconds = one_s, other_s
    together_s = max(seconds) + share * min(seconds)
    assert bus_share(seconds, together_s) == pytest.approx(share, abs=1e-9)
    assert bus_share(seconds, max(seconds)) == bus_share(seconds, 0.9 * max(seconds)) == 0.0
    assert bus_share(seconds, 3 * together_s) == 1.0


def test_what_cores_explain_is_no_bus() -> None:
    """Two messages that need all cores each take as long as one after the other on a CPU, whatever links they have."""
    assert bus_share((1.0, 1.0), 2.0, (1.0, 1.0)) == 0.0
    assert bus_share((1.0, 1.0), 2.0, (0.2, 0.2)) == 1.0


def timed(world: World, cluster: Cluster) -> PairSample:
    torch.set_num_threads(1)
    device, timeout = torch.device("cpu"), timedelta(seconds=60)
    one, other = (TierLinks(cluster, tier, world.rank, device, timeout, UNPACED) for tier in (0, 1))
    found = measure_pair(Stopwatch(world.world_size, device), one, other, 0.5)
    one.close()
    other.close()
    return found


def test_messages_of_two_tiers_are_timed_at_once(pool: LocalPool) -> None:
    found = pool.run(4, timed, cluster_of(2, 2), timeout_s=120.0)
    assert all(each == found[0] for each in found)
    assert found[0].tiers == ("package", "node")
    assert 0 < found[0].together_s < 10 * sum(found[0].seconds)
