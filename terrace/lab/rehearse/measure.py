"""Measurements of `terrace rehearse check`, and the configured value of each.

A tier is measured in up to four ways: the round trip of a small message; one pair of ranks alone; on shared tiers all
ranks of one group at once, over their uplink; and an all-reduce in all groups of the tier at once, as in training.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from terrace.lab.rehearse.wiring import TierNet, Wiring

_AIM_S = 0.5  # per transfer: long enough that the burst of a limited link does not matter
_SMALLEST_BYTES, _LARGEST_BYTES = 64 * 1024, 32 * 1024 * 1024
_NUM_ROUND_TRIPS = 20
_ELEMENT_BYTES = 8


class Way(StrEnum):
    LATENCY = "latency"
    PAIR = "pair"
    UPLINK = "uplink"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """Either messages along `routes` (from, to), or an all-reduce in each of `groups`; all at once."""

    index: int  # of the tier
    way: Way
    num_bytes: int  # of one message, or of the tensor that is reduced
    num_times: int = 1
    routes: tuple[tuple[int, int], ...] = ()
    groups: tuple[tuple[int, ...], ...] = ()

    def table(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("num_bytes", "num_times", "routes", "groups")}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of one tier: seconds for `LATENCY`, otherwise bytes per second."""

    tier: str
    way: Way
    configured: float | None  # None: not limited, or not added
    measured: float

    @property
    def deviation(self) -> float | None:
        """(measured - configured) / configured."""
        return None if self.configured is None else (self.measured - self.configured) / self.configured


def experiments(wiring: Wiring) -> list[Experiment]:
    return [experiment for net in wiring.nets for experiment in _of_tier(wiring, net)]


def figures(wiring: Wiring, seconds: Sequence[float]) -> list[Figure]:
    """Figures from the seconds of the experiments, in the order of `experiments`."""
    return [
        _figure(wiring.net(experiment.index), experiment, taken_s)
        for experiment, taken_s in zip(experiments(wiring), seconds, strict=True)
    ]


def _of_tier(wiring: Wiring, net: TierNet) -> list[Experiment]:
    cluster, index = wiring.cluster, net.index
    step = cluster.ranks_within(index - 1)  # from a rank to the one that differs on this tier only
    link = net.rate_bytes_per_s
    groups = sorted({cluster.peers(rank, index) for rank in wiring.ranks})
    found = [
        Experiment(index=index, way=Way.LATENCY, num_bytes=8, num_times=_NUM_ROUND_TRIPS, routes=((0, step),)),
        Experiment(index=index, way=Way.PAIR, num_bytes=_size(link), routes=((0, step),)),
    ]
    if net.uplinks:
        routes = tuple((rank, rank + step) for rank in net.uplinks[0].ranks)
        size = _size(link / len(routes))
        found.append(Experiment(index=index, way=Way.UPLINK, num_bytes=size, routes=routes))
    size = _size(net.tier.bandwidth_bytes_per_s if link < math.inf else link)
    found.append(Experiment(index=index, way=Way.ALL_REDUCE, num_bytes=size, groups=tuple(groups)))
    return found


def _size(rate_bytes_per_s: float) -> int:
    return int(min(max(rate_bytes_per_s * _AIM_S, _SMALLEST_BYTES), _LARGEST_BYTES)) // _ELEMENT_BYTES * _ELEMENT_BYTES


def _figure(net: TierNet, experiment: Experiment, taken_s: float) -> Figure:
    link = net.rate_bytes_per_s
    if experiment.way == Way.LATENCY:
        configured: float | None = net.ports[0].delay_s or None
        # Half a round trip: the delay of one direction.
        measured = taken_s / experiment.num_times / 2
    elif experiment.way == Way.ALL_REDUCE:
        # A ring all-reduce sends 2 (n - 1) / n of the tensor from every rank.
        configured = net.tier.bandwidth_bytes_per_s if link < math.inf else None
        size = net.tier.size
        measured = 2 * (size - 1) / size * experiment.num_bytes / taken_s
    else:
        configured = link if link < math.inf else None
        measured = len(experiment.routes) * experiment.num_bytes / taken_s
    return Figure(tier=net.tier.name, way=experiment.way, configured=configured, measured=measured)
