"""The position of a rank's main thread, and how long it has stood still there."""

import time
from typing import NamedTuple


class Position(NamedTuple):
    """A position in a run. The watchdog's thread calls `str(doing)` later, so it must not change."""

    step: int
    counter: int
    doing: object
    ranks: tuple[int, ...] | None  # those that it waits with; empty: it computes; None: outside a step
    extra_s: float  # that it may stand still beyond the timeout


class Stillness:
    """For how many `seconds` a rank has been at one `position` of a step, by looks at most `most_s` apart."""

    def __init__(self, position: Position, most_s: float) -> None:
        self.position, self.seconds = position, 0.0
        self._most_s, self._looked_s = most_s, time.monotonic()

    def look(self, position: Position) -> float:
        """Seconds since the last look.

        A process that was itself suspended has not watched meanwhile, so a longer gap does not count.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, self._most_s)
        is_still = position is self.position and position.ranks is not None
        self.seconds = self.seconds + passed_s if is_still else 0.0
        self.position, self._looked_s = position, now_s
        return passed_s
