"""The pace of messages and of the media below a device: none, or, at `TERRACE_PACE`, that of a product (the lab)."""

from contextlib import AbstractContextManager, nullcontext
from typing import cast

from terrace.base.errors import ConfigError
from terrace.base.products import first
from terrace.cluster.cluster import Cluster
from terrace.plan.wire import MessageClass


class Pace:
    """A pace without limits, which never sleeps."""

    is_limited = False

    def begin(self) -> float:
        """Start time to pass to `sent`. Call right before the collective."""
        return 0.0

    def sent(self, tier_name: str, num_bytes: int, num_messages: int, begin_s: float) -> float:
        """Sleep until the link has carried the bytes sent since `begin_s`. Returns the seconds slept.

        Call right after a blocking collective on that tier.
        """
        return 0.0

    def __call__(self, tier_name: str, num_bytes: int, num_messages: int = 1) -> AbstractContextManager[None]:
        """Context that paces the collective inside. No delay if it raises."""
        return nullcontext()

    def between(self, rank: int, other: int) -> "Pace":
        """The pace of messages from one rank to another alone, whose members may have a faster link."""
        return self

    def least_s(self, tier_name: str, num_bytes: int, num_messages: int = 1) -> float:
        """Seconds that these messages take on an idle link. Raises `ClusterError` for an unknown tier."""
        return 0.0


UNPACED = Pace()


def lane_below(message: MessageClass, medium: str) -> str:
    """The name, in place of a tier's, of the lane that carries `message` (KEEP_READ or KEEP_WRITE) of a medium."""
    return f"{message.value} of {medium}"


def pace_of(cluster: Cluster, scale: float | None) -> Pace:
    """The pace of a rank. Without a scale there is no limit. Raises `ConfigError` if no product has a pacer."""
    if scale is None:
        return UNPACED
    pacer = first(lambda product: product.pacer)
    if pacer is None:
        raise ConfigError(f"TERRACE_PACE={scale:g}, but no installed product paces messages (the lab does): unset it")
    return cast(Pace, pacer(cluster, scale))
