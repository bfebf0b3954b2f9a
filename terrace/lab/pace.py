"""Paced mode: sleeps that limit communication to a cluster's rates, where no network can be emulated.

Each tier is one link of this rank, on which a collective takes at least

    num_messages * latency_s / scale + num_bytes / (bandwidth_bytes_per_s * scale)

from its start, or from the end of earlier messages of other threads on this link. Traffic is not shaped: a link that
is slower than this stays slower, and a `shared` tier is modelled only by its bandwidth, which is a rank's share.
A medium below the device has a link each way, at its share of the cluster's rates and without latency, and so have
the host's cores where they update.
Sleeps end about 0.1 ms late. No torch here: the caller reports the bytes sent.
"""

import copy
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from terrace.base.errors import ConfigError
from terrace.cluster.cluster import Cluster
from terrace.cluster.members import slowest_link
from terrace.comm.pace import Pace, lane_below
from terrace.plan.keep import CORES
from terrace.plan.wire import MessageClass


class Pacer(Pace):
    """Limits one rank to the rates of `cluster`, scaled by `scale`. Thread-safe.

    Raises `ConfigError` unless the scale is above 0.
    """

    is_limited = True

    def __init__(
        self,
        cluster: Cluster,
        scale: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not (math.isfinite(scale) and scale > 0):
            raise ConfigError(f"pace {scale} must be a number above 0: 0.1 makes every link ten times slower")
        # Messages among members with links of their own take the slowest.
        self._cluster, self._scale, self._clock, self._sleep = cluster.alike[0][0], scale, clock, sleep
        self._whole = cluster
        self._lock = threading.Lock()
        self._below = dict[str, float]()  # lane of a medium -> seconds of a byte
        for name, medium in cluster.device.below.items():
            self._below[lane_below(MessageClass.KEEP_READ, name)] = medium.read_s(1)
            self._below[lane_below(MessageClass.KEEP_WRITE, name)] = medium.write_s(1)
            if medium.update_bytes_per_s:
                self._below[CORES] = medium.update_s(1)
        links = (*(tier.name for tier in cluster.tiers), *self._below)
        self._free_s = dict.fromkeys(links, -math.inf)  # when each link is idle

    def between(self, rank: int, other: int) -> "Pacer":
        ends = {self._whole.coordinates(each)[-1] for each in (rank, other)}
        *inner, tier = self._whole.tiers
        members = [each for each in tier.members for _ in range(each.count)]
        if len(ends) == 1 or not members:
            return self
        bandwidth, latency_s = slowest_link([members[end] for end in ends], tier.bandwidth_bytes_per_s, tier.latency_s)
        link = replace(tier, bandwidth_bytes_per_s=bandwidth, latency_s=latency_s)
        found = copy.copy(self)  # a member's messages share its link, whatever their pace
        found._cluster = replace(self._cluster, tiers=(*inner, replace(link, members=())))
        return found

    def least_s(self, tier_name: str, num_bytes: int, num_messages: int = 1) -> float:
        if tier_name == "device":
            raise ConfigError("a device has no link to pace: nothing is sent on it")
        if tier_name in self._below:
            return num_bytes * self._below[tier_name] / self._scale
        tier = self._cluster.tiers[self._cluster.index(tier_name)]
        return num_messages * tier.latency_s / self._scale + num_bytes / (tier.bandwidth_bytes_per_s * self._scale)

    def begin(self) -> float:
        return self._clock()

    def sent(self, tier_name: str, num_bytes: int, num_messages: int, begin_s: float) -> float:
        needed_s = self.least_s(tier_name, num_bytes, num_messages)
        with self._lock:
            # Under the lock, so that concurrent lanes share the link one after the other.
            end_s = max(begin_s, self._free_s[tier_name]) + needed_s
            self._free_s[tier_name] = end_s
        left_s = end_s - self._clock()
        if left_s > 0:
            self._sleep(left_s)
        return max(left_s, 0.0)

    @contextmanager
    def __call__(self, tier_name: str, num_bytes: int, num_messages: int = 1) -> Iterator[None]:
        begin_s = self.begin()
        yield
        self.sent(tier_name, num_bytes, num_messages, begin_s)
