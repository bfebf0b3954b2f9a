"""What the ranks measured, as plain values: means over all ranks, the same on each."""

from dataclasses import dataclass

from terrace.probe.fit import AttentionSample, GemmSample, LayerSample, LinkSample, OptimizerSample, PassSample


@dataclass(frozen=True, kw_only=True)
class TierSamples:
    """Collectives of one tier, back to back; and what one takes longer when ranks compute before each.

    `skew_s` is per neighbour: ranks that compute reach a message at slightly different moments.
    """

    tier: str
    messages: tuple[LinkSample, ...]
    skew_s: float
    overlap: "Overlap"


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Seconds of computing alone, of `num_messages` messages among `degree` ranks alone, and of both side by side."""

    compute_s: float
    message_s: float
    together_s: float
    num_messages: int
    degree: int

    @property
    def late_s(self) -> float:
        """What a message beside computing takes longer than both in turn, per neighbour: it waits for a core."""
        return max(0.0, self.together_s - self.compute_s - self.message_s) / self.num_messages / (self.degree - 1)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Everything that one probe measured."""

    device: str  # "cpu" or "cuda"
    num_cores: int  # that take tiles; 0 on a CPU
    gemms: tuple[GemmSample, ...]
    copies: tuple[PassSample, ...]
    norms: tuple[PassSample, ...]
    fresh: tuple[PassSample, ...]  # what first writing new memory takes beyond writing; none on a device
    attention: tuple[AttentionSample, ...]
    layers: tuple[LayerSample, ...]
    launch_s: float
    host_layer_s: float
    optimizer: tuple[OptimizerSample, ...]
    tiers: tuple[TierSamples, ...]  # those with more than one member, innermost first
