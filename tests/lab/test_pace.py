"""The paced mode: least seconds of a collective, by a clock that tests turn."""

import threading
import time
from dataclasses import replace

import pytest

from terrace.base.errors import ClusterError, ConfigError
from terrace.cluster.below import Medium
from terrace.cluster.cluster import Cluster, Tier
from terrace.cluster.members import Member
from terrace.lab.pace import Pacer
from terrace.runtime.kept.channel import Paced
from tests.support.toys import cluster_of


class Clock:
    """Time that passes only by sleeping, and by `pass_s`."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def read(self) -> float:
        return self.now_s

    def pass_s(self, duration_s: float) -> None:
        self.now_s += duration_s


def _cluster() -> Cluster:
    tiers = (
        Tier(name="node", size=2, bandwidth_bytes_per_s=1e6, latency_s=0.01),
        Tier(name="system", size=2, bandwidth_bytes_per_s=1e5, latency_s=0.1, shared=True),
    )
    return Cluster(name="test", device=cluster_of(2).device, tiers=tiers)


def _pacer(scale: float = 1.0) -> tuple[Pacer, Clock]:
    clock = Clock()
    return Pacer(_cluster(), scale, clock=clock.read, sleep=clock.pass_s), clock


@pytest.mark.parametrize(("scale", "expected_s"), [(1.0, 2 * 0.01 + 0.5), (0.5, 2 * 0.02 + 1.0), (10.0, 0.052)])
def test_a_collective_takes_latency_and_bytes_at_scale(scale: float, expected_s: float) -> None:
    pacer, clock = _pacer(scale)
    with pacer("node", 500_000, 2):
        pass
    assert clock.now_s == pytest.approx(100 + expected_s)
    assert pacer.least_s("node", 500_000, 2) == pytest.approx(expected_s)


def test_time_already_taken_counts() -> None:
    pacer, clock = _pacer()
    begin_s = pacer.begin()
    clock.pass_s(0.3)
    assert pacer.sent("node", 500_000, 1, begin_s) == pytest.approx(0.21)
    assert clock.now_s == pytest.approx(100.51)


def test_what_is_slower_by_itself_is_not_held() -> None:
    pacer, clock = _pacer()
    with pacer("node", 500_000):
        clock.pass_s(2.0)
    assert clock.now_s == 102


def test_an_idle_link_saves_nothing_up() -> None:
    pacer, clock = _pacer()
    clock.pass_s(50)
    with pacer("node", 1_000_000):
        pass
    assert clock.now_s == pytest.approx(151.01)


def test_two_at_once_on_one_tier_queue_and_on_two_tiers_do_not() -> None:
    clock = Clock()
    ends_s = []
    pacer = Pacer(_cluster(), 1.0, clock=clock.read, sleep=lambda left_s: ends_s.append(clock.now_s + left_s))
    for tier, num_bytes in (("node", 500_000), ("node", 500_000), ("system", 10_000)):
        pacer.sent(tier, num_bytes, 0, 100.0)  # three threads that began together
    assert ends_s == pytest.approx([100.5, 101.0, 100.1])


def test_nothing_sent_is_not_held() -> None:
    pacer, clock = _pacer()
    with pacer("system", 0, 0):
        pass
    assert clock.now_s == 100


def test_a_collective_that_raises_is_not_held() -> None:
    pacer, clock = _pacer()
    with pytest.raises(RuntimeError, match="lost"), pacer("system", 10**9):
        raise RuntimeError("connection lost")
    assert clock.now_s == 100


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_is_none(scale: float) -> None:
    with pytest.raises(ConfigError, match=r"pace .* must be a number above 0"):
        Pacer(_cluster(), scale)


def test_tiers_that_are_not_there() -> None:
    pacer, _ = _pacer()
    with pytest.raises(ClusterError, match="no tier 'rack'"):
        pacer.least_s("rack", 1)
    with pytest.raises(ConfigError, match="a device has no link"):
        pacer.least_s("device", 1)


def test_the_real_clock() -> None:
    """Two threads share a link of 1 MB/s: 2 x 20 kB take 40 ms at least."""
    cluster = Cluster(
        name="test",
        device=cluster_of(2).device,
        tiers=(Tier(name="node", size=2, bandwidth_bytes_per_s=1e6, latency_s=0.0),),
    )
    pacer, begin_s = Pacer(cluster, 1.0), time.monotonic()
    threads = [threading.Thread(target=pacer.sent, args=("node", 20_000, 1, pacer.begin())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin_s > 0.039


class Memory:
    """A store of one piece."""

    sizes = (500_000,)

    def read(self, number: int, memory: memoryview) -> None:
        memory[0] = 7

    write = read

    def close(self) -> None:
        pass


def test_a_medium_below_the_device_is_held_to_its_share_of_each_rate() -> None:
    disk = Medium(memory_bytes=1e9, read_bytes_per_s=2e6, write_bytes_per_s=1e6, shared_by="node")
    cluster = replace(_cluster(), device=replace(_cluster().device, below={"disk": disk}))
    clock = Clock()
    store, piece = Paced(Memory(), "disk", Pacer(cluster, 0.5, clock=clock.read, sleep=clock.pass_s)), bytearray(1)
    store.read(0, memoryview(piece))
    assert clock.now_s == pytest.approx(100 + 2 * 2 * 0.25), "two ranks share the disk, at half its rate"
    assert piece == b"\7"
    begin_s = clock.now_s
    store.write(0, memoryview(piece))
    assert clock.now_s - begin_s == pytest.approx(2 * 2 * 0.5), "a read does not delay a write"


def test_members_with_a_slower_link_hold_all() -> None:
    own = cluster_of(1, 2)
    *inner, tier = own.tiers
    slow = Member(bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s / 4, latency_s=2 * tier.latency_s)
    pacer = Pacer(replace(own, tiers=(*inner, replace(tier, members=(Member(), slow)))), 1.0)
    assert pacer.least_s(tier.name, 1000) == pytest.approx(2 * tier.latency_s + 4000 / tier.bandwidth_bytes_per_s)


def test_two_members_are_held_to_the_slower_of_their_links() -> None:
    """And messages of both pairs of a member follow each other on its link."""
    own, clock = cluster_of(2, 3), Clock()
    *inner, tier = own.tiers
    rate = tier.bandwidth_bytes_per_s
    members = (Member(), Member(), Member(bandwidth_bytes_per_s=rate / 10))
    pacer = Pacer(
        replace(own, tiers=(*inner, replace(tier, members=members))), 2.0, clock=clock.read, sleep=clock.pass_s
    )
    fast, slow = pacer.between(2, 0), pacer.between(2, 4)  # members 1 and 0, 1 and 2
    assert fast.least_s(tier.name, 1000) == pytest.approx(tier.latency_s / 2 + 1000 / (2 * rate))
    assert slow.least_s(tier.name, 1000) == pytest.approx(tier.latency_s / 2 + 10_000 / (2 * rate))
    assert pacer.between(0, 1) is pacer, "ranks of one member"
    begin_s = clock.now_s
    for each in (fast, slow):
        each.sent(tier.name, 1000, 1, begin_s)
    assert clock.now_s - begin_s == pytest.approx(fast.least_s(tier.name, 1000) + slow.least_s(tier.name, 1000))
