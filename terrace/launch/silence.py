"""Silence: a rank whose heartbeats stop while the others wait for it outside a step, where no timeout runs."""

from collections.abc import Sequence

from terrace.launch.postmortem import GONE, Heartbeat


class Silence:
    """Whether some rank that has published heartbeats has published none for `limit_s`."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._heard: dict[int, tuple[int, float]] = {}  # rank: number of its newest heartbeat, since when

    def look(self, beats: Sequence[Heartbeat], now_s: float) -> bool:
        """By the newest heartbeat of every rank, at `now_s` of a clock."""
        found = False
        for beat in beats:
            number, since_s = self._heard.get(beat.rank, (-1, now_s))
            if beat.state == "absent" or beat.state in GONE or beat.number != number:
                self._heard[beat.rank] = beat.number, now_s
            else:
                found |= now_s - since_s >= self._limit_s
        return found
