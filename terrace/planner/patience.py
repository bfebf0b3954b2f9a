"""A time limit for searches that produce an error's advice, with progress lines.

A search for plans is bounded by `--limit`, a number of plans. A search over sizes of a cluster runs many of them, so
a `Patience` bounds it by the clock, and the error then names only the sizes ruled out by that time.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_EVERY_S = 0.5  # between two reports of progress


class OutOfTimeError(Exception):
    """A search has exceeded its `Patience`; its caller catches this and reports the partial result."""


@dataclass(kw_only=True)
class Patience:
    """`limit_s` seconds from construction, by `clock`; `words` are passed to `tell` every half second."""

    limit_s: float = math.inf
    tell: Callable[[str], None] = field(default=lambda words: None)
    # CPU time, so that the result does not depend on other programs; a search does not block.
    clock: Callable[[], float] = time.process_time
    words: str = ""

    def __post_init__(self) -> None:
        self._began_s = self._told_s = self.clock()

    def check(self) -> None:
        """Called in every round of a search. Raises `OutOfTimeError` after the limit."""
        if self is ENDLESS:
            return
        now_s = self.clock()
        if now_s - self._began_s >= self.limit_s:
            raise OutOfTimeError
        if now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            self.tell(f"{self.words} ({now_s - self._began_s:.0f} s)")


ENDLESS = Patience()
