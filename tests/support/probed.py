"""Measurements that a machine with known constants would show."""

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from terrace.cluster.cluster import Cluster, Device, Kernels
from terrace.cluster.presets import load_cluster
from terrace.model.attention_kernel import AttentionKernel
from terrace.model.block_operations import layer_operations
from terrace.probe.fit import AttentionSample, GemmSample, LayerSample, LinkSample, OptimizerSample, PassSample
from terrace.probe.grid import gemm_shapes, layer_shapes, message_sizes, orientations
from terrace.probe.samples import Overlap, Samples, TierSamples
from terrace.simulate.kernels import attention_s, gemm_s, memory_s
from terrace.simulate.layers import block_seconds, optimizer_s
from terrace.simulate.work import Work

TRUE = Kernels(
    gemm=0.7, gemm_half_depth=180.0, memory=0.6, attention=0.4, launch_s=5e-6, host_layer_s=1e-4, optimizer_s=2e-3
)


def device(kernels: Kernels = TRUE, name: str = "dgx-a100") -> Device:
    return replace(load_cluster(name).device, kernels=kernels)


def gemms(true: Device, noise: Callable[[], float] = lambda: 1.0) -> list[GemmSample]:
    shapes = [each for shape in gemm_shapes(1e12, 8) for each in orientations(shape)]
    return [
        GemmSample(dtype=dtype, m=m, k=k, n=n, seconds=gemm_s(true, m, k, n, dtype=dtype) * noise())
        for dtype in ("bf16", "fp32")
        for m, k, n in shapes
    ]


def messages(degree: int, latency_s: float, bandwidth: float, noise: Callable[[], float] = lambda: 1.0) -> Any:
    sizes = [size * (degree - 1) / degree for size in message_sizes(64 << 20, degree, 7)]
    return [
        LinkSample(
            kind=kind,
            degree=degree,
            sent_bytes=sent,
            seconds=((degree - 1) * latency_s + sent / bandwidth) * noise(),
        )
        for sent in sizes
        for kind in ("gather", "reduce")
    ]


def noise_of(seed: int, spread: float = 0.05) -> Callable[[], float]:
    draw = random.Random(seed)
    return lambda: math.exp(draw.gauss(0.0, spread))


def layers(true: Device) -> list[LayerSample]:
    samples = []
    for config, sequence, micro_batch in layer_shapes(1e13, 6):
        work = Work(layer=layer_operations(config), sequence=sequence, micro_batch=micro_batch, compute="fp32")
        seconds = block_seconds(true, work, accumulate=True)
        samples.append(LayerSample(work=work, forward_s=seconds.forward_s, backward_s=seconds.backward_s))
    return samples


def attention_of(true: Device, length: int, kernel: AttentionKernel = "sdpa") -> AttentionSample:
    """Causal attention of the shape that a probe measures on a GPU."""
    shape: dict[str, Any] = {"batch": 4, "heads": 16, "head_dim": 128, "dtype": "bf16"}
    ways = attention_s(true, queries=length, keys=length, kernel=kernel, **shape)
    return AttentionSample(sequence=length, forward_s=ways[0], backward_s=ways[1], **shape)


def synthetic(true: Cluster) -> Samples:
    """The measurements of a machine with the constants of `true`."""
    mean = replace(true.device)  # means over ranks: at the pace of the mean device, not of the slowest
    step = [OptimizerSample(num_shards=6, numel=n, seconds=optimizer_s(mean, 6 * n)) for n in (10**5, 10**7)]
    attention = [attention_of(mean, length) for length in (128, 256, 512, 1024, 2048, 4096, 8192)]
    # Torch takes the first by itself; flash attention 2 is another kernel on some devices.
    kernels: dict[str, AttentionKernel] = {"cudnn": "sdpa", "flash": "varlen"}
    by_kernel = {name: attention_of(mean, 8192, kernel) for name, kernel in kernels.items()}
    passes = tuple(PassSample(num_bytes=size, seconds=memory_s(mean, size)) for size in (1e8, 1e9))
    return Samples(
        device="cuda",
        num_cores=mean.kernels.num_cores,
        gemms=tuple(gemms(mean)),
        copies=passes,
        norms=passes,
        attention=tuple(attention),
        attention_kernels=by_kernel,
        layers=tuple(layers(mean)),
        launch_s=mean.kernels.launch_s,
        host_layer_s=mean.kernels.host_layer_s,
        optimizer=tuple(step),
        tiers=tuple(
            TierSamples(
                tier=tier.name,
                messages=tuple(messages(tier.size, tier.latency_s, tier.bandwidth_bytes_per_s)),
                skew_s=0.0,
                overlap=Overlap(compute_s=2.0, message_s=1.0, together_s=2.3, num_messages=4, degree=2),
            )
            for tier in true.tiers
        ),
    )
