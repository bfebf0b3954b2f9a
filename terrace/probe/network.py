"""A quick measurement of the links: latency and bandwidth of every tier, from a small and a large all-gather.

All groups of a tier communicate at once, as in a step, through the runtime's own groups and lanes. `terrace probe` fits
more constants from more sizes and takes longer.
"""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from terrace.cluster.cluster import Cluster
from terrace.comm.pace import pace_of
from terrace.comm.process_group import rank_device
from terrace.launch.start import pace
from terrace.launch.world import World
from terrace.probe.links import TierLinks
from terrace.probe.measure import watched
from terrace.probe.timing import Stopwatch
from terrace.simulate.links import latency_and_rate

_SMALL_BYTES, _LARGE_BYTES = 4_096, 1 << 20  # per rank
_TIMEOUT = timedelta(seconds=240)


@dataclass(frozen=True, kw_only=True)
class MeasuredTier:
    """Measured latency per neighbour and sent bytes per second of a tier, and those of the cluster file (`told_`)."""

    tier: str
    latency_s: float
    bandwidth_bytes_per_s: float
    given_latency_s: float
    given_bandwidth_bytes_per_s: float

    @property
    def share(self) -> float:
        """Measured bandwidth relative to the cluster file's."""
        return self.bandwidth_bytes_per_s / self.given_bandwidth_bytes_per_s


def measure_links(world: World, cluster: Cluster, seconds: float, say: Callable[[str], None]) -> list[MeasuredTier]:
    """Measure all tiers with more than one member in about `seconds`. A collective: every rank gets the same result.

    Raises `HangError` when another rank stopped.
    """
    device, rate = rank_device(), pace()
    stopwatch, found = Stopwatch(world.world_size, device), []
    crossed = [index for index, tier in enumerate(cluster.tiers) if tier.size > 1]
    with watched(world, say) as progress:
        for index in crossed:
            tier = cluster.tiers[index]
            progress(f"messages on tier {tier.name}")
            links = TierLinks(cluster, index, world.rank, device, _TIMEOUT, pace_of(cluster, rate))
            each_s = seconds / len(crossed) / 2
            small_s, large_s = (
                stopwatch.seconds(links.call("gather", size * links.degree), each_s, agreed=True)
                for size in (_SMALL_BYTES, _LARGE_BYTES)
            )
            links.close()
            neighbours = tier.size - 1
            latency_s, bandwidth = latency_and_rate(
                _SMALL_BYTES, small_s / neighbours, _LARGE_BYTES, large_s / neighbours
            )
            found.append(
                MeasuredTier(
                    tier=tier.name,
                    latency_s=latency_s,
                    bandwidth_bytes_per_s=bandwidth,
                    given_latency_s=tier.latency_s,
                    given_bandwidth_bytes_per_s=tier.bandwidth_bytes_per_s * tier.efficiency,
                )
            )
    return found
