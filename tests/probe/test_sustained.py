"""What a probe says of a device at work: products over time, attention by kernel, products beside messages."""

import time
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster
from terrace.comm.pace import UNPACED
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.probe import measure as probing
from terrace.probe import sustained
from terrace.probe.assemble import assemble
from terrace.probe.fit import AttentionSample
from terrace.probe.links import TierLinks, measure_concurrent
from terrace.probe.samples import Concurrent, Samples, Sustained
from terrace.probe.timing import Stopwatch
from tests.support.probed import synthetic
from tests.support.toys import cluster_of

WATCH = Stopwatch(1, torch.device("cpu"))


def test_a_clock_that_falls_shows_in_the_last_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    now, loops = [0.0], list[float]()

    def loop(self: Stopwatch, work: Any, num_calls: int) -> float:
        # 1 ms a product for the first 10 s, then 1.25 ms.
        each_s = 1e-3 if now[0] < 10 else 1.25e-3
        now[0] += num_calls * each_s
        loops.append(each_s)
        return each_s

    monkeypatch.setattr(Stopwatch, "host_loop_s", loop)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = sustained.measure_sustained(WATCH, "fp32", 30.0, lambda what: None)
    assert found.burst_flops_per_s == pytest.approx(2 * 256**3 / 1e-3)
    assert found.share == pytest.approx(0.8)
    assert 30.0 <= now[0] <= 31.5


def test_products_are_measured_for_as_long_as_was_asked() -> None:
    begin_s = time.perf_counter()
    found = sustained.measure_sustained(WATCH, "fp32", 0.4, lambda what: None)
    assert time.perf_counter() - begin_s >= 0.4
    assert found.flops_per_s > 1e8


def test_each_kernel_that_runs_is_measured_and_the_others_are_left_out() -> None:
    shape = AttentionSample(dtype="fp32", batch=1, heads=2, head_dim=32, sequence=64, forward_s=1.0, backward_s=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of a kernel that is not there
        found = sustained.measure_kernels(WATCH, shape, 0.2)
    assert set(found) == {"flash", "math"}
    assert all(sample.forward_s > 0 and sample.sequence == 64 for sample in found.values())


def _beside(world: World, cluster: Cluster) -> tuple[Concurrent, int]:
    torch.set_num_threads(1)
    links = TierLinks(cluster, 0, world.rank, torch.device("cpu"), timedelta(seconds=60), UNPACED)
    watch, calls = Stopwatch(world.world_size, torch.device("cpu")), 0
    left = torch.randn(128, 128)

    def product() -> None:
        nonlocal calls
        calls += 1
        torch.mm(left, left)

    found = measure_concurrent(watch, links, product, 0.5)
    links.close()
    return found, links.counted_bytes


def test_products_are_timed_while_messages_are_under_way() -> None:
    with LocalPool(2) as pool:
        (first, sent), (second, _) = pool.run(2, _beside, cluster_of(2), timeout_s=120.0)
    assert first == second, "one figure for all ranks"
    assert first.alone_s > 0
    assert sent > 0


def test_a_gpu_is_heated_for_half_the_budget_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    heated = list[float]()

    def heat(watch: Stopwatch, name: str, seconds: float, say: Any) -> Sustained:
        heated.append(seconds)
        return Sustained(seconds=seconds, burst_flops_per_s=2.0, flops_per_s=1.0)

    monkeypatch.setattr(probing, "measure_sustained", heat)
    monkeypatch.setattr(probing, "HEAT_S", {"cpu": 30.0})
    world = World(0, 1, 0, 1, dist.HashStore())  # type: ignore[attr-defined]
    found = probing._measure(world, cluster_of(1), torch.device("cpu"), 0.2, UNPACED, lambda what: None)
    assert heated == [0.1]
    assert found.sustained is not None
    assert set(found.attention_kernels) == {"flash", "math"}


def test_findings_without_a_constant_are_rows() -> None:
    start = load_cluster("dgx-a100")
    shown: Samples = synthetic(start)
    tiers = tuple(replace(each, concurrent=Concurrent(alone_s=2.0, concurrent_s=2.3)) for each in shown.tiers)
    longest = max(shown.attention, key=lambda sample: sample.sequence)
    slow = replace(longest, forward_s=2 * longest.forward_s, backward_s=2 * longest.backward_s)
    shown = replace(
        shown,
        tiers=tiers,
        sustained=Sustained(seconds=30.0, burst_flops_per_s=4.0, flops_per_s=3.0),
        attention_kernels={"flash": longest, "efficient": slow},
    )
    probed = assemble(start, shown)
    rows = {row.name: row.now for row in probed.rows}
    assert rows["products after 30 s / at once"] == 0.75
    assert rows[f"{start.tiers[0].name}: products beside messages / alone"] == pytest.approx(1.15)
    assert rows["attention forward by flash"] == pytest.approx(probed.cluster.device.kernels.attention, rel=0.05)
    assert rows["attention forward by efficient"] == pytest.approx(rows["attention forward by flash"] / 2, rel=0.1)
