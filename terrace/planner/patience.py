"""How long a search for advice may take, and whom it tells where it is.

A search of plans is bounded by the number of plans (`--limit`), but one of clusters of many sizes is many of these.
A `Patience` ends it by the clock; what it has found by then is what is said.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

_EVERY_S = 0.5  # between two words of progress


class OutOfTimeError(Exception):
    """The patience is over. Not an error of a user: whoever started the search says what is known."""


@dataclass(kw_only=True)
class Patience:
    """`limit_s` seconds from now, by `clock`; `tell` receives `words` every half a second of a search."""

    limit_s: float = math.inf
    tell: Callable[[str], None] = field(default=lambda words: None)
    # Seconds of the processor, which is all that a search waits for: what is said does not depend on other programs.
    clock: Callable[[], float] = time.process_time
    words: str = ""

    def __post_init__(self) -> None:
        self._began_s = self._told_s = self.clock()

    def check(self) -> None:
        """Called by a search again and again; raises `OutOfTimeError` once the time is over."""
        now_s = self.clock()
        if now_s - self._began_s >= self.limit_s:
            raise OutOfTimeError
        if now_s - self._told_s >= _EVERY_S:
            self._told_s = now_s
            self.tell(f"{self.words} ({now_s - self._began_s:.0f} s)")


ENDLESS = Patience()
