"""The probe: fits recover known constants, refuse what shows none, and two real ranks give a cluster that loads."""

import math
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import tomli_w
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from terrace.base.errors import ProbeError
from terrace.base.schema import dump
from terrace.cluster.cluster import Cluster
from terrace.cluster.presets import load_cluster, parse_cluster
from terrace.comm.pace import UNPACED
from terrace.launch.start import LocalPool
from terrace.launch.world import World
from terrace.probe.assemble import assemble
from terrace.probe.fit import (
    AttentionSample,
    OptimizerSample,
    PassSample,
    fit_attention,
    fit_gemm,
    fit_layers,
    fit_link,
    fit_memory,
    fit_optimizer,
    mean_error,
    overlap_penalty,
)
from terrace.probe.grid import gemm_shapes, layer_shapes, message_sizes
from terrace.probe.links import FIRST_BYTES, LARGEST_BYTES, TierLinks, largest_bytes
from terrace.probe.measure import measure
from terrace.probe.samples import Overlap, PairSample, Samples
from terrace.simulate.kernels import attention_s, memory_s, stream_s
from terrace.simulate.layers import optimizer_s
from terrace.simulate.links import rate_bytes_per_s
from tests.support.probed import TRUE, device, gemms, layers, messages, noise_of, synthetic
from tests.support.toys import cluster_of


@settings(max_examples=10, deadline=None)
@given(share=st.floats(0.2, 1.0), half_depth=st.floats(0.0, 800.0))
def test_a_product_fit_recovers_its_constants(share: float, half_depth: float) -> None:
    true = device(replace(TRUE, gemm=share, gemm_half_depth=half_depth))
    found, depth, error = fit_gemm(device(), gemms(true))
    assert found == pytest.approx(share, rel=0.02)
    assert depth == pytest.approx(half_depth, rel=0.05, abs=15.0)
    assert error < 0.01


def test_a_product_fit_bears_noise_and_one_wild_point() -> None:
    samples = gemms(device(), noise_of(1))
    samples[3] = replace(samples[3], seconds=50 * samples[3].seconds)
    share, half_depth, error = fit_gemm(device(), samples)
    assert share == pytest.approx(0.7, rel=0.06)
    assert half_depth == pytest.approx(180, rel=0.35)
    assert 0.01 < error < 1.2  # the wild point alone is 49 / 48 of it


def test_slower_products_fit_to_a_smaller_share() -> None:
    shares = [
        fit_gemm(device(), [replace(each, seconds=each.seconds * factor) for each in gemms(device())])[0]
        for factor in (1.0, 1.5, 2.0, 4.0)
    ]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 3 * shares[-1]


def test_a_share_never_leaves_its_bounds() -> None:
    fast = [replace(each, seconds=each.seconds / 10) for each in gemms(device())]
    share, half_depth, error = fit_gemm(device(), fast)
    assert share == 1.0
    assert half_depth >= 0
    assert error > 0.5


@settings(max_examples=10, deadline=None)
@given(share=st.floats(0.01, 1.0))
def test_memory_attention_and_optimizer_fits_recover_their_constants(share: float) -> None:
    true = device(replace(TRUE, memory=share, attention=share))
    passes = [PassSample(num_bytes=size, seconds=memory_s(true, size)) for size in (1e7, 1e8, 1e9)]
    found, error = fit_memory(device(), passes)
    assert found == pytest.approx(share, rel=0.01)
    assert error < 0.01
    sizes: dict[str, Any] = {"batch": 2, "heads": 8, "head_dim": 64}
    attention = []
    for length in (512, 1024, 4096):
        forward_s, backward_s = attention_s(true, queries=length, keys=length, dtype="fp32", **sizes)
        attention.append(
            AttentionSample(dtype="fp32", sequence=length, forward_s=forward_s, backward_s=backward_s, **sizes)
        )
    assert fit_attention(device(), attention)[0] == pytest.approx(share, rel=0.02)
    steps = [
        OptimizerSample(num_shards=6, numel=numel, seconds=optimizer_s(true, 6 * numel)) for numel in (10**4, 10**6)
    ]
    assert fit_optimizer(true, steps)[0] == pytest.approx(TRUE.optimizer_s, rel=0.01)


def test_layers_show_what_stands_between_their_products() -> None:
    alone = replace(TRUE, memory=0.5, launch_s=1e-6, host_layer_s=0.0)
    true = device(replace(alone, memory=0.3, launch_s=2e-5))
    found = fit_layers(device(alone), layers(true))
    assert found[0] == pytest.approx(0.3, rel=0.15)
    assert found[1] == pytest.approx(2e-5, rel=0.15)
    assert found[2] < 0.05


@settings(max_examples=20, deadline=None)
@given(degree=st.integers(2, 16), latency_s=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e7, 1e10))
def test_a_link_fit_recovers_latency_and_bandwidth(degree: int, latency_s: float, bandwidth: float) -> None:
    fit = fit_link(messages(degree, latency_s, bandwidth))
    smallest_s = 4096 * (degree - 1) / bandwidth  # the least that was sent tells no latency below its own time
    assert fit.latency_s * (degree - 1) == pytest.approx((degree - 1) * latency_s, rel=0.02, abs=0.02 * smallest_s)
    assert fit.bandwidth_bytes_per_s == pytest.approx(bandwidth, rel=0.02)
    assert fit.half_bytes <= 0.05 * 64 * 2**20
    assert fit.error < 0.01


def test_a_link_fit_bears_noise_and_one_wild_point() -> None:
    samples = messages(4, 5e-5, 1e9, noise_of(2))
    samples[5] = replace(samples[5], seconds=20 * samples[5].seconds)
    fit = fit_link(samples)
    assert fit.latency_s == pytest.approx(5e-5, rel=0.1)
    assert fit.bandwidth_bytes_per_s == pytest.approx(1e9, rel=0.1)


def test_what_larger_messages_lose_beyond_the_smallest_is_the_half_size() -> None:
    late = [replace(each, seconds=each.seconds + 1e-3) for each in messages(2, 1e-5, 1e9)]
    first = [replace(each, seconds=2e-5) if each.sent_bytes == 4096 else each for each in late]
    fit = fit_link(first)
    assert fit.latency_s == pytest.approx(2e-5, rel=0.01)
    lost_s = fit.half_bytes / 2 / fit.bandwidth_bytes_per_s
    assert lost_s == pytest.approx(1e-3, rel=0.1)


@pytest.mark.parametrize("slope", [0.0, -0.5])
def test_times_that_do_not_grow_bound_the_bandwidth(slope: float) -> None:
    """As a busy machine may measure them: no error, but a bandwidth that was reached, and a large deviation."""
    samples = messages(2, 1e-5, 1e9)
    most = max(each.sent_bytes for each in samples)
    flat = [replace(each, seconds=1e-3 * (1 + slope * each.sent_bytes / most)) for each in samples]
    fit = fit_link(flat)
    assert fit.is_bound
    assert fit.bandwidth_bytes_per_s == pytest.approx(most / (1e-3 * (1 + slope)))
    assert 0 < fit.latency_s <= 1e-3
    assert fit.half_bytes == 0
    assert fit.error > 0.05
    assert not fit_link(samples).is_bound


@pytest.mark.parametrize(
    ("fit", "said"),
    [
        (lambda: fit_gemm(device(), []), "no matrix products were measured"),
        (lambda: fit_gemm(device(), gemms(device())[:1] * 3), "all have one inner size"),
        (lambda: fit_gemm(device(), [replace(gemms(device())[0], seconds=math.nan)]), "to take nan s"),
        (lambda: fit_memory(device(), [PassSample(num_bytes=1e6, seconds=0.0)]), "to take 0.0 s"),
        (lambda: fit_attention(device(), []), "no attention"),
        (lambda: fit_optimizer(device(), []), "no optimizer steps"),
        (lambda: fit_layers(device(replace(TRUE, launch_s=0.0)), layers(device())), "launch of a kernel"),
        (lambda: fit_link([]), "no messages"),
        (lambda: fit_link(messages(2, 1e-5, 1e9)[:1]), "all have one size"),
        (lambda: fit_link(messages(2, 1e-5, 1e9) + messages(4, 1e-5, 1e9)), "give one degree"),
        (lambda: overlap_penalty(1.0, 0.0, 1.0), "to take 0.0 s"),
    ],
)
def test_what_shows_no_constant_is_one_clear_error(fit: Callable[[], object], said: str) -> None:
    with pytest.raises(ProbeError, match=said):
        fit()


@given(compute_s=st.floats(0.1, 10), message_s=st.floats(0.1, 10), penalty=st.floats(0, 1))
def test_the_overlap_penalty_is_found_again(compute_s: float, message_s: float, penalty: float) -> None:
    together_s = max(compute_s, message_s) + penalty * min(compute_s, message_s)
    assert overlap_penalty(compute_s, message_s, together_s) == pytest.approx(penalty, abs=1e-9)


def test_the_overlap_penalty_stays_between_none_and_all() -> None:
    assert overlap_penalty(1.0, 0.5, 0.9) == 0.0
    assert overlap_penalty(1.0, 0.5, 9.0) == 1.0


@given(limit=st.floats(1e3, 1e16), count=st.integers(2, 20))
def test_shapes_fit_the_limit(limit: float, count: int) -> None:
    shapes = gemm_shapes(limit, count)
    assert 1 <= len(shapes) <= count
    assert len(set(shapes)) == len(shapes)
    assert len(shapes) == 1 or all(2 * m * k * n <= limit for m, k, n in shapes)
    assert layer_shapes(limit, 6)


@given(largest=st.floats(2**22, 2**30), degree=st.integers(2, 64))
def test_message_sizes_grow_and_divide(largest: float, degree: int) -> None:
    sizes = message_sizes(largest, degree, 7)
    assert sizes == sorted(set(sizes))
    assert len(sizes) == 7
    assert all(size % (64 * degree) == 0 for size in sizes)


@given(degree=st.integers(2, 64), calls=st.floats(1e-3, 1e3))
def test_the_largest_message_takes_as_long_as_the_link_bears(degree: int, calls: float) -> None:
    most = LARGEST_BYTES["cpu"]
    found = largest_bytes(degree, calls, most)
    assert found >= degree << 16
    if calls <= 1:  # one of the first takes longer than the budget
        assert found == max(FIRST_BYTES, degree << 16)
    if calls >= 64:
        assert found >= degree << 20
    assert found <= max(most, degree << 20)


def test_what_a_message_loses_beside_computing_is_late_per_neighbour() -> None:
    overlap = Overlap(compute_s=2.0, message_s=1.0, together_s=3.6, num_messages=2, degree=4)
    assert overlap.late_s == pytest.approx(0.1)
    assert replace(overlap, together_s=2.9).late_s == 0.0


def test_assembling_gives_back_the_machine_that_was_measured() -> None:
    start = load_cluster("dgx-a100")
    kernels = replace(start.device.kernels, **{name: getattr(TRUE, name) for name in ("gemm", "memory", "launch_s")})
    tiers = tuple(replace(tier, efficiency=1.0, half_bytes=0.0) for tier in start.tiers)
    true = replace(start, device=replace(start.device, kernels=kernels), tiers=tiers)
    probed = assemble(start, synthetic(true))
    found = probed.cluster.device
    assert found.peak_flops_per_s == start.device.peak_flops_per_s  # nothing went faster: it is this device
    assert found.kernels.gemm == pytest.approx(kernels.gemm, rel=0.05)
    assert found.kernels.memory == pytest.approx(kernels.memory, rel=0.1)
    assert found.kernels.attention == pytest.approx(kernels.attention, rel=0.05)
    assert found.marks["peak_flops_per_s.bf16"] == found.marks["kernels.tiles"] == "preset"
    assert found.marks["kernels.gemm"] == "fitted"
    assert found.marks["kernels.host_layer_s"] == "measured"
    for tier, was in zip(probed.cluster.tiers, true.tiers, strict=True):
        assert (tier.name, tier.size) == (was.name, was.size)
        assert tier.bandwidth_bytes_per_s == pytest.approx(was.bandwidth_bytes_per_s, rel=0.02)
        assert tier.overlap_penalty == pytest.approx(0.3)
        assert tier.marks["latency_s"] == tier.marks["overlap_penalty"] == "measured"
    assert parse_cluster(dump(probed.cluster)) == probed.cluster
    assert tomli_w.dumps(dump(probed.cluster))


def test_two_tiers_that_take_longer_at_once_share_a_bus() -> None:
    start = load_cluster("pcie-a100")
    for share, known in ((0.0, {}), (0.75, {"node": 0.75})):
        pair = PairSample(tiers=("node", "system"), seconds=(2.0, 4.0), together_s=4.0 + 2.0 * share)
        probed = assemble(start, replace(synthetic(start), pairs=(pair,)))
        assert dict(probed.cluster.tiers[1].bus) == known
        assert probed.cluster.tiers[1].marks["bus"] == "measured"
        (row,) = (row for row in probed.rows if row.name == "system.bus.node")
        assert (row.before, row.now) == (0.0, share)
        assert parse_cluster(dump(probed.cluster)) == probed.cluster


@pytest.mark.parametrize(("name", "tier", "size"), [("frontier", 1, 4), ("dgx-h100", 1, 64)])
def test_what_is_not_measured_of_wires_and_width_stays(name: str, tier: int, size: int) -> None:
    """All members together reach what was measured; fewer still have fewer links, or more of the fabric."""
    start = load_cluster(name)
    start = replace(start, tiers=(*start.tiers[:tier], replace(start.tiers[tier], size=size), *start.tiers[tier + 1 :]))
    probed = assemble(start, synthetic(start)).cluster
    here, was = probed.tiers[tier], start.tiers[tier]
    assert (here.links, here.tree, here.contention) == (was.links, was.tree, was.contention)
    measured = rate_bytes_per_s(probed, tier, 0)
    assert measured == pytest.approx(was.bandwidth_bytes_per_s, rel=0.02)
    few, every = (rate_bytes_per_s(start, tier, 0, degree=degree) for degree in (2, 0))
    assert rate_bytes_per_s(probed, tier, 0, degree=2) == pytest.approx(measured * few / every)
    assert few != every
    assert parse_cluster(dump(probed)) == probed


def test_a_device_faster_than_the_peak_of_its_description_gets_a_measured_one() -> None:
    true = load_cluster("dgx-a100")
    slow = replace(true, device=replace(true.device, peak_flops_per_s={"bf16": 1e9, "fp32": 1e9}))
    found = assemble(slow, synthetic(true)).cluster.device
    assert found.peak_flops_per_s["bf16"] > 1e13
    assert found.marks["peak_flops_per_s.bf16"] == "measured"


def _measure(world: World, cluster: Cluster) -> Samples:
    torch.set_num_threads(1)
    return measure(world, cluster, 1.0, lambda what: None)


@pytest.mark.nightly  # by day cli/test_cli_probe.py has two ranks
def test_two_ranks_measure_the_same_and_it_makes_a_cluster() -> None:
    cluster = cluster_of(2, 1)
    with LocalPool(2) as pool:
        first, second = pool.run(2, _measure, cluster, timeout_s=120.0)
    assert first == second
    assert [tier.tier for tier in first.tiers] == ["package"]
    assert len({each.sent_bytes for each in first.tiers[0].messages}) >= 6
    probed = assemble(cluster, first).cluster
    assert parse_cluster(dump(probed)) == probed
    assert probed.device.peak_flops_per_s["fp32"] > 1e8
    assert probed.device.marks["peak_flops_per_s.fp32"] == "measured"
    assert probed.device.marks["peak_flops_per_s.fp64"] == "preset"
    assert probed.tiers[1].marks["latency_s"] == "preset"
    assert mean_error([1.0], [2.0]) == 0.5


def _sent(world: World, cluster: Cluster) -> list[tuple[float, float]]:
    """Return, of a gather and a reduction over each tier, what this rank sent and what the probe believes."""
    torch.set_num_threads(1)
    found: list[tuple[float, float]] = []
    for tier in range(len(cluster.tiers)):
        links = TierLinks(cluster, tier, world.rank, torch.device("cpu"), timedelta(seconds=60), UNPACED)
        for kind in ("gather", "reduce"):
            before = links.counted_bytes
            links.call(kind, 4096)()
            found.append((links.counted_bytes - before, links.sent_bytes(4096)))
        links.close()
    return found


def test_every_rank_sends_what_the_probe_prices() -> None:
    """Ranks that stand elsewhere on the other tiers are no less busy: all groups of a tier work at once."""
    with LocalPool(4) as pool:
        for found in pool.run(4, _sent, cluster_of(2, 2), timeout_s=120.0):
            assert found == [(2048.0, 2048.0)] * 4


def test_a_cpu_shows_what_streams() -> None:
    true = load_cluster("local")
    kernels = replace(TRUE, memory=0.2, stream=0.7)
    device = replace(true.device, memory_bandwidth_bytes_per_s=1e10, kernels=kernels)
    shown = synthetic(replace(true, device=replace(device, peak_flops_per_s={"fp32": 4e10, "bf16": 1e11})))
    sums = tuple(PassSample(num_bytes=size, seconds=stream_s(device, size)) for size in (1e8, 1e9))
    found = assemble(true, replace(shown, device="cpu", copies=sums)).cluster.device
    assert found.kernels.stream * found.memory_bandwidth_bytes_per_s == pytest.approx(7e9, rel=0.02)
    assert found.marks["kernels.stream"] == "fitted"


@pytest.mark.nightly
def test_a_single_rank_has_no_messages() -> None:
    cluster = cluster_of(1)
    with LocalPool(1) as pool:
        (samples,) = pool.run(1, _measure, cluster, timeout_s=120.0)
    assert samples.tiers == ()
    assert assemble(cluster, samples).cluster.tiers[0].marks["bandwidth_bytes_per_s"] == "preset"
