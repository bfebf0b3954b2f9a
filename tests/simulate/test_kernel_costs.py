"""The price of kernels: closed answers on an ideal device, and published rates of products and attention."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from terrace.base.errors import ClusterError
from terrace.cluster.cluster import Kernels
from terrace.cluster.presets import load_cluster
from terrace.simulate.kernels import attention_s, gemm_s, gemm_share, memory_s, peak_flops_per_s

A100 = load_cluster("dgx-a100").device
IDEAL = replace(A100, kernels=Kernels())
MEMORY_ONLY = replace(IDEAL, peak_flops_per_s={"bf16": 1e30})

sizes = st.integers(1, 5000)


@given(m=sizes, k=sizes, n=sizes, batch=st.integers(1, 64))
def test_an_ideal_product_is_the_plain_roofline(m: int, k: int, n: int, batch: int) -> None:
    compute_s = 2 * m * k * n * batch / 312e12
    memory = 2 * batch * (m * k + k * n + m * n) / 2.039e12
    assert gemm_s(IDEAL, m, k, n, batch) == pytest.approx(max(compute_s, memory))


@given(m=sizes, k=sizes, n=sizes)
def test_a_product_reaches_less_than_a_large_one(m: int, k: int, n: int) -> None:
    share = gemm_share(A100, m, k, n)
    assert 0 < share <= A100.kernels.gemm * k / (k + A100.kernels.gemm_half_depth)
    assert gemm_s(A100, m, k, n) > gemm_s(IDEAL, m, k, n)
    assert gemm_s(A100, 2 * m, k, n) >= gemm_s(A100, m, k, n) * (1 - 1e-12)
    assert gemm_share(A100, m, k + 1, n) > share


def test_tiles_and_waves_by_hand() -> None:
    """108 cores: 108 tiles are one full wave, 109 fill 109 of 216 places; a narrow result fills half of a tile."""
    device = replace(A100, kernels=Kernels(num_cores=108, tiles=((128, 128, 1.0),)))
    assert gemm_share(device, 128 * 108, 4096, 128) == pytest.approx(1.0)
    assert gemm_share(device, 128 * 109, 4096, 128) == pytest.approx(109 / 216)
    assert gemm_share(device, 128 * 108, 4096, 64) == pytest.approx(0.5)
    deep = replace(A100, kernels=Kernels(gemm=0.8, gemm_half_depth=250.0))
    assert gemm_share(deep, 4096, 250, 4096) == pytest.approx(0.4)
    two = replace(A100, kernels=Kernels(num_cores=108, tiles=((256, 128, 1.0), (128, 128, 0.9))))
    assert gemm_share(two, 128, 4096, 128 * 108) == pytest.approx(0.9), "the better tile is taken"


def test_flash_attention_by_hand() -> None:
    shaped = partial(attention_s, batch=2, heads=3, queries=512, keys=512, head_dim=64, flash=True)
    full = 4 * 2 * 3 * 512 * 512 * 64 / 312e12
    forward, backward = shaped(IDEAL, causal=False)
    assert forward == pytest.approx(full)
    assert backward == pytest.approx(2.5 * full)
    assert shaped(IDEAL, causal=True)[0] == pytest.approx(full / 2)
    half = replace(IDEAL, kernels=Kernels(attention=0.5))
    assert shaped(half, causal=False)[0] == pytest.approx(2 * full)


@pytest.mark.parametrize(
    ("preset", "shape", "measured", "below"),
    [
        (
            "dgx-a100",
            (8192, 8192, 8192),
            257,
            (0.97, 1.0),
        ),  # random data, which draws the power of training (thonking.ai)
        (
            "dgx-a100",
            (1024, 5120, 10240),
            271.2,
            (0.89, 0.92),
        ),  # the best shapes of a search (ML Engineering, MAMF table)
        ("dgx-h100", (2048, 13312, 2048), 794.5, (0.82, 0.85)),
        ("dgx-h100", (8192, 8192, 8192), 720, (0.94, 0.97)),  # random data (SemiAnalysis, MI300X vs H100 vs H200)
    ],
)
def test_large_products_against_published_ones(
    preset: str, shape: tuple[int, int, int], measured: float, below: tuple[float, float]
) -> None:
    """TFLOP/s of one device: below the best of a search, further on an H100, and near the sustained rate."""
    device = replace(load_cluster(preset).device, spread=0.0)
    found = 2 * math.prod(shape) / gemm_s(device, *shape) / 1e12
    assert below[0] * measured <= found <= below[1] * measured


@pytest.mark.parametrize(
    ("preset", "shape", "measured", "part"),
    [
        ("dgx-a100", (6912, 2048, 16384), 267.9, 0.90),  # ML Engineering, MAMF table
        ("alps", (11264, 1536, 19712), 821.0, 0.86),  # the same
        ("dgx-h100", (16896, 1024, 15680), 807.1, 0.86),  # mag-/gpu_benchmark
        ("dgx-h100", (6144, 2816, 17920), 792.1, 0.86),  # the same
    ],
)
def test_shallow_products_are_as_near_to_the_best_as_deep_ones(
    preset: str, shape: tuple[int, int, int], measured: float, part: float
) -> None:
    """The best shapes of searches: the same part of them at every inner size, as in the test above."""
    device = replace(load_cluster(preset).device, spread=0.0)
    assert 2 * math.prod(shape) / gemm_s(device, *shape) / 1e12 == pytest.approx(part * measured, rel=0.025)


@pytest.mark.parametrize(
    ("preset", "hidden", "inner", "measured_ms", "within"),
    [
        ("dgx-a100", 8192, 1024, 0.3015, 0.08),
        ("dgx-a100", 4096, 4096, 0.5971, 0.08),
        ("dgx-h100", 8192, 1024, 0.0921, 0.12),  # an eighth of a layer draws less power, so its clock is higher
        ("dgx-h100", 8192, 2048, 0.2003, 0.03),
        ("dgx-h100", 8192, 4096, 0.3922, 0.03),
        ("dgx-h100", 8192, 8192, 0.7905, 0.03),
    ],
)
def test_projections_of_4096_tokens_by_their_inner_size(
    preset: str, hidden: int, inner: int, measured_ms: float, within: float
) -> None:
    """Output projections of attention on random values, without their launch (Vidur, data/profiling/compute)."""
    device = load_cluster(preset).device
    device = replace(device, spread=0.0, kernels=replace(device.kernels, launch_s=0.0))
    assert 1e3 * gemm_s(device, 4096, inner, hidden) == pytest.approx(measured_ms, rel=within)


@pytest.mark.parametrize(
    ("keys", "forward", "backward"),
    [(2048, 484, 370), (4096, 591, 474), (8192, 644, 541), (16384, 673, 579), (32768, 688, 581)],
)
@pytest.mark.parametrize("name", ["dgx-h100", "dgx-h200", "alps"])
def test_attention_of_hopper_is_what_was_published(name: str, keys: int, forward: float, backward: float) -> None:
    """cuDNN 9.19, causal, heads of 128, on an H200 (cudnn-frontend, h200_919_only_cudnn)."""
    kernels = load_cluster(name).device.kernels
    assert kernels.attention_share(128, keys) * 989.4 == pytest.approx(forward, rel=0.05)
    assert kernels.attention_share(128, keys, backward=True) * 989.4 == pytest.approx(backward, rel=0.08)


@pytest.mark.parametrize(
    ("head_dim", "forward", "backward"), [(128, 335, 0.905 * 322), (64, 0.9 * 335, 0.9 * 0.905 * 322)]
)
def test_flash_attention_2_of_an_h100_is_what_was_published(head_dim: int, forward: float, backward: float) -> None:
    """Causal, 16k keys (Shah et al. 2407.08608, figures 5 and 6); FlexAttention as a part of it."""
    kernels = load_cluster("dgx-h100").device.kernels
    assert kernels.attention_share(head_dim, 16384, flash2=True) * 989.4 == pytest.approx(forward, rel=0.01)
    assert kernels.attention_share(head_dim, 16384, backward=True, flash2=True) * 989.4 == pytest.approx(
        backward, rel=0.01
    )
    # Azure, ND H100 v5 and ND H200 v5: with a mask forward, or both directions without one, which the page leaves open.
    for name, measured in (("dgx-h100", 327.9), ("dgx-h200", 329.3)):
        shares = load_cluster(name).device.kernels
        forward, backward = (
            989.4 * shares.attention_share(128, 8192, backward=each, flash2=True) for each in (False, True)
        )
        assert forward == pytest.approx(measured, rel=0.03)
        assert 3.5 / (1 / forward + 2.5 / backward) / 0.905 == pytest.approx(measured, rel=0.05)
    a100 = load_cluster("dgx-a100").device.kernels
    assert a100.attention_share(128, flash2=True) == a100.attention_share(128), "there torch takes it"
    device = replace(load_cluster("dgx-h100").device, kernels=replace(kernels, launch_s=0.0))
    shaped = partial(attention_s, device, batch=1, heads=16, queries=4096, keys=4096, head_dim=128)
    varlen, flex = shaped(kernel="varlen"), shaped(kernel="flex")
    assert (varlen[0] / flex[0], varlen[1] / flex[1]) == pytest.approx((0.90, 0.85))
    assert shaped()[0] < varlen[0]


def test_shares_of_attention_by_hand() -> None:
    shaped = Kernels(attention=0.6, attention_backward=0.3, attention_half_head=64.0, attention_half_keys=100.0)
    assert shaped.attention_share(128) == pytest.approx(0.6)
    assert shaped.attention_share(256) == pytest.approx(0.6), "nothing is gained beyond 128"
    assert shaped.attention_share(64) == pytest.approx(0.6 * 0.5 * 1.5)
    assert shaped.attention_share(128, 100) == pytest.approx(0.3)
    assert shaped.attention_share(128, backward=True) == pytest.approx(0.3)
    device = replace(IDEAL, kernels=shaped)
    forward, backward = attention_s(device, batch=2, heads=3, queries=100, keys=100, head_dim=128)
    flops = 4 * 2 * 3 * 100 * 100 * 128 / 2
    assert forward == pytest.approx(flops / (312e12 * 0.3))
    assert backward == pytest.approx(2.5 * flops / (312e12 * 0.15))


def test_unfused_attention_moves_the_scores() -> None:
    """4 bytes a score forward and 6 backward; the products take and leave the scores."""
    scores = 2 * 3 * 512 * 512
    operands = 2 * 3 * 512 * 64 * 2
    forward, backward = attention_s(MEMORY_ONLY, batch=2, heads=3, queries=512, keys=512, head_dim=64, flash=False)
    assert forward * 2.039e12 == pytest.approx(4 * scores + 2 * (2 * scores + 2 * operands))
    assert backward * 2.039e12 == pytest.approx(6 * scores + 4 * (2 * scores + 2 * operands))


def test_every_kernel_costs_its_launch() -> None:
    device = replace(A100, kernels=Kernels(launch_s=1.0))
    assert memory_s(device, 0, 3) == 3.0
    assert gemm_s(device, 1, 1, 1) == pytest.approx(1.0)


def test_a_dtype_without_a_peak_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"has no peak_flops_per_s\.fp8"):
        peak_flops_per_s(A100, "fp8")


# Blocks
