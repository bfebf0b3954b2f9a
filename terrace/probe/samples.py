"""Measurements as plain values: means over all ranks, the same on each rank."""

from dataclasses import dataclass

from terrace.probe.fit import AttentionSample, GemmSample, LayerSample, LinkSample, OptimizerSample, PassSample


@dataclass(frozen=True, kw_only=True)
class TierSamples:
    """Collectives of one tier back to back, and the extra seconds of one when ranks compute before each.

    `skew_s` is per neighbour: ranks that compute reach a message at slightly different moments.
    """

    tier: str
    messages: tuple[LinkSample, ...]
    skew_s: float
    overlap: "Overlap"


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
        """Extra seconds per neighbour of a message during compute, beyond both in turn: it waits for a core."""
        return max(0.0, self.together_s - self.compute_s - self.message_s) / self.num_messages / (self.degree - 1)


@dataclass(frozen=True, kw_only=True)
class PairSample:
    """Seconds of messages on each of two tiers alone, the inner first, and of both at once."""

    tiers: tuple[str, str]
    seconds: tuple[float, float]
    together_s: float


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Everything that one probe measured."""

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
