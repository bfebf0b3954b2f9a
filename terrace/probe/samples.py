"""Measurements as plain values: means over all ranks, equal on each rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from terrace.probe.below import NO_MEDIUM, MediumSample
from terrace.probe.fit import AttentionSample, GemmSample, LayerSample, LinkSample, OptimizerSample, PassSample


@dataclass(frozen=True, kw_only=True)
class TierSamples:
    """Back-to-back collectives of one tier, and the extra seconds of one when ranks compute before each.

    `skew_s` is per neighbour: ranks that compute reach a message at slightly different times.
    """

    tier: str
    messages: tuple[LinkSample, ...]
    skew_s: float
    overlap: "Overlap"
    concurrent: "Concurrent | None" = None


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds of compute alone, of `num_messages` messages among `degree` ranks alone, and of both at once."""

    compute_s: float
    message_s: float
    together_s: float
    num_messages: int
    degree: int

    @property
    def late_s(self) -> float:
        """Extra seconds per neighbour of a message during compute, beyond both in sequence: it waits for a core."""
        return max(0.0, self.together_s - self.compute_s - self.message_s) / self.num_messages / (self.degree - 1)


@dataclass(frozen=True, kw_only=True)
class Concurrent:
    """Seconds of matrix products alone, and during continuous all-reduces over a tier."""

    alone_s: float
    concurrent_s: float

    @property
    def slowdown(self) -> float:
        """Time of products during messages relative to products alone."""
        return self.concurrent_s / self.alone_s


@dataclass(frozen=True, kw_only=True)
class Sustained:
    """Initial FLOP/s of large products, and after `seconds` of nothing else."""

    seconds: float
    burst_flops_per_s: float
    flops_per_s: float

    @property
    def share(self) -> float:
        """Sustained over initial rate."""
        return self.flops_per_s / self.burst_flops_per_s


@dataclass(frozen=True, kw_only=True)
class PairSample:
    """Seconds of messages on each of two tiers alone, the inner one first, and of both at once."""

    tiers: tuple[str, str]
    seconds: tuple[float, float]
    together_s: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    device: str  # "cpu" or "cuda"
    num_cores: int  # streaming multiprocessors; 0 on a CPU
    gemms: tuple[GemmSample, ...]
    copies: tuple[PassSample, ...]
    norms: tuple[PassSample, ...]
    attention: tuple[AttentionSample, ...]
    layers: tuple[LayerSample, ...]
    launch_s: float
    host_layer_s: float
    optimizer: tuple[OptimizerSample, ...]
    tiers: tuple[TierSamples, ...]  # tiers with more than one member, innermost first
    pairs: tuple[PairSample, ...] = ()  # two of them at once
    rates: tuple[float, ...] = ()  # FLOP/s of products of every rank, where the cluster's members differ
    sustained: Sustained | None = None  # before all others; None where it was not measured
    attention_kernels: Mapping[str, AttentionSample] = field(default_factory=dict)  # the longest row, by kernel
    disk: MediumSample = NO_MEDIUM
    host: MediumSample = NO_MEDIUM
