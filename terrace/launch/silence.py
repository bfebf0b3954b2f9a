"""Detects a rank whose heartbeats stop while the others wait for it outside a step, where no timeout applies.

The parent of local ranks can do this, too: the ranks' watchdogs then only publish, with a timeout of `NEVER_S`.
"""

import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import PrefixStore, Store

from terrace.launch.heartbeats import HeartbeatStore
from terrace.launch.postmortem import GONE, Diagnosis, Heartbeat, diagnose
from terrace.launch.seal import Seal

BEATS, INTERVAL_S = "step", 0.5  # the name space of heartbeats in the store of a world, and seconds between two
WINDOW_INTERVALS = 4.0  # between two looks, in which every living rank has published
NEVER_S = 1e9


class Silence:
    """Whether a rank that has published heartbeats has published no new one for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._newest: dict[int, tuple[int, float]] = {}  # rank: number of its newest heartbeat, since when

    def look(self, beats: Sequence[Heartbeat], now_s: float) -> bool:
        """Checks the newest heartbeat of every rank, at clock time `now_s`."""
        found = False
        for beat in beats:
            number, since_s = self._newest.get(beat.rank, (-1, now_s))
            if beat.state == "absent" or beat.state in GONE or beat.number != number:
                self._newest[beat.rank] = beat.number, now_s
            else:
                found |= now_s - since_s >= self._limit_s
        return found


def beats_of(store: Store, seal: Seal, world_size: int) -> HeartbeatStore:
    return HeartbeatStore(PrefixStore(BEATS, store), -1, world_size, INTERVAL_S, seal.within(BEATS))


def silent(worlds: Sequence[HeartbeatStore]) -> list[Diagnosis | None]:
    """The silent rank of each world, if any, from two readings some intervals apart."""
    before, begin_s = [world.read_all() for world in worlds], time.monotonic()
    time.sleep(WINDOW_INTERVALS * INTERVAL_S)
    passed_s = time.monotonic() - begin_s
    found = [diagnose(old, world.read_all(), passed_s) for world, old in zip(worlds, before, strict=True)]
    return [each if each.rule == "silent" else None for each in found]
