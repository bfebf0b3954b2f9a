"""Seconds of one kernel: a matrix product, an attention core, a pass over memory.

A product of (m, k) and (k, n) is a roofline that depends on the shape:

    seconds = max( 2 m k n / (peak * eps * pace), bytes / (bandwidth * stream) ) + launch
    eps     = gemm * max over tiles( share * tile_fill * wave_fill ) * k / (k + half_depth)

`tile_fill` is the share of the tiles that the result covers, `wave_fill` the share of the last wave of tiles that has
work. The depth term is a fixed cost per wave, to fill a tile's pipeline and write its result: a wave takes as long as
k + half_depth steps. The constants are `Kernels` of the device; with their defaults this is the plain roofline. In fp8
`gemm_fp8` replaces `gemm`; the fixed cost takes the same seconds, so `half_depth` grows with the peak. `pace` is the
clock of the cluster's slowest device over the mean: products and attention scale with the clock, passes over memory do
not. Not modelled: caches, split-k.
"""

import math
from functools import lru_cache, partial

from terrace.base.errors import ClusterError, did_you_mean
from terrace.cluster.device import Device
from terrace.model.attention_kernel import AttentionKernel
from terrace.plan.wire import FORMATS

_FLASH_BACKWARD = 2.5  # five products where the forward has two: the scores are computed again (Dao 2307.08691)

# FlexAttention over flash attention 2, forward and backward, causal on an A100 (PyTorch blog of 2024-08-07).
_FLEX = (0.90, 0.85)


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """The device's dense peak for `dtype`. Raises `ClusterError` if it states none."""
    peak = device.peak_flops_per_s.get(dtype)
    if peak is None:
        known = did_you_mean(dtype, device.peak_flops_per_s)
        raise ClusterError(f"device {device.name!r} has no peak_flops_per_s.{dtype}: add it{known}")
    return peak


def gemm_s(device: Device, m: int, k: int, n: int, batch: int = 1, dtype: str = "bf16") -> float:
    """Seconds of `batch` products of (m, k) and (k, n)."""
    item = FORMATS[dtype].element_bytes
    flops = 2.0 * m * k * n * batch
    share = gemm_share(device, m, k, n, batch)
    compute_s = flops / (peak_flops_per_s(device, dtype) * share * device.pace) if flops else 0.0
    return max(compute_s, stream_s(device, item * batch * (m * k + k * n + m * n), 0)) + device.kernels.launch_s


def gemm_share(device: Device, m: int, k: int, n: int, batch: int = 1) -> float:
    """Share of the peak that `batch` products of (m, k) and (k, n) reach when compute-bound."""
    return device.kernels.gemm * _shape_share(device, m, k, n, batch, device.kernels.gemm_half_depth)


def fp8_share(device: Device, m: int, k: int, n: int) -> float:
    """`gemm_share` of a product of 8-bit floats, relative to their peak.

    The fixed seconds of a wave are those of bf16, so they are more steps at the higher peak.
    """
    faster = peak_flops_per_s(device, "fp8") / device.peak_flops_per_s.get("bf16", math.inf)
    half_depth = device.kernels.gemm_half_depth * max(1.0, faster)
    return (device.kernels.gemm_fp8 or device.kernels.gemm) * _shape_share(device, m, k, n, 1, half_depth)


def _shape_share(device: Device, m: int, k: int, n: int, batch: int, half_depth: float) -> float:
    kernels = device.kernels
    num_cores, best = kernels.num_cores, 0.0
    for rows, columns, share in kernels.tiles:
        num_tiles = -(-m // rows) * -(-n // columns)
        # Edge tiles compute padding.
        fill = share * (m * n / (num_tiles * rows * columns))
        if num_cores:
            # The last wave occupies all cores' time even if it fills only some of them.
            waves = num_tiles * batch / num_cores
            fill = fill * waves / math.ceil(waves)
        best = max(best, fill)
    return (best if kernels.tiles else 1.0) * k / (k + half_depth)


def attention_s(
    device: Device,
    *,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    head_dim: int,
    flash: bool = True,
    causal: bool = True,
    dtype: str = "bf16",
    kernel: AttentionKernel = "sdpa",
    capped: bool = False,
) -> tuple[float, float]:
    """(Forward, backward) seconds of softmax(Q K^T) V for (batch, heads, queries x keys) scores.

    A flash kernel counts 4 b a q k d FLOPs forward, half of them when `causal`, and 2.5 times as many backward, each at
    the share of the peak of its `kernel`; its traffic is neglected (Dao 2307.08691, section 2). Without it there are
    two batched products forward and four backward over the full square, and the scores pass through memory: with bf16,
    4 bytes a score forward and 6 backward for the fused scale, mask and softmax (Korthikanti et al. 2205.05198, section
    4.1, lists the stored tensors). Without a fused cap, `capped` adds a read and a write of the scores in fp32 at
    least, forward and backward. FlexAttention's cap is not priced: it is applied in registers.
    """
    pairs = batch * heads
    if flash:
        flops = 4.0 * pairs * queries * keys * head_dim * (0.5 if causal else 1.0)
        seconds = flops / (peak_flops_per_s(device, dtype) * device.pace)
        share = partial(device.kernels.attention_share, head_dim, keys, flash2=kernel in ("varlen", "flex"))
        slower = _FLEX if kernel == "flex" else (1.0, 1.0)
        forward = seconds / (slower[0] * share())
        backward = _FLASH_BACKWARD * seconds / (slower[1] * share(backward=True))
        return forward + device.kernels.launch_s, backward + device.kernels.launch_s
    forward, backward = _plain_attention_s(device, pairs, queries, keys, head_dim, dtype)
    if capped:
        passes = memory_s(device, 2 * max(4, FORMATS[dtype].element_bytes) * pairs * queries * keys)
        return forward + passes, backward + passes
    return forward, backward


@lru_cache(maxsize=65536)
def _plain_attention_s(
    device: Device, pairs: int, queries: int, keys: int, head_dim: int, dtype: str
) -> tuple[float, float]:
    item = FORMATS[dtype].element_bytes
    scores = pairs * queries * keys
    to_scores = gemm_s(device, queries, head_dim, keys, pairs, dtype)  # Q K^T; backward, dO V^T
    from_scores = gemm_s(device, queries, keys, head_dim, pairs, dtype)  # P V; backward, dS K
    transposed = gemm_s(device, keys, queries, head_dim, pairs, dtype)  # backward: P^T dO, dS^T Q
    forward = to_scores + from_scores + memory_s(device, 2 * item * scores)
    backward = to_scores + from_scores + 2 * transposed + memory_s(device, 3 * item * scores)
    return forward, backward


def memory_s(device: Device, num_bytes: float, num_kernels: int = 1) -> float:
    """Seconds of `num_kernels` memory-bound kernels that read and write `num_bytes` together."""
    bandwidth = device.memory_bandwidth_bytes_per_s * device.kernels.memory
    return num_bytes / bandwidth + num_kernels * device.kernels.launch_s


def stream_s(device: Device, num_bytes: float, num_kernels: int = 1) -> float:
    """`memory_s` for kernels that only read, add and write long rows, which may be faster."""
    share = device.kernels.stream or device.kernels.memory
    return num_bytes / (device.memory_bandwidth_bytes_per_s * share) + num_kernels * device.kernels.launch_s
