"""Time spans of role calls: seconds by phase, and the share of time in which ranks were idle.

A span covers the ranks whose results are collected, by their own clocks, from the first start to the last end.
"""

import time
import weakref
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_MOST = 1 << 16  # spans kept until `taken`; the oldest are dropped, for a controller that never takes them
PHASES = {
    "hand_over": "reshard",
    "give": "reshard",
    "write": "reshard",
    "load": "reshard",
    "generate": "generate",
    "rewards": "reward",
    "actor.logprobs": "old_log_prob",
    "reference.logprobs": "ref",
    "values": "values",
    "update": "update",
}


def now_s() -> float:
    """Unix time, to compare machines. For display only: nothing depends on it."""
    return time.time()


class Span(NamedTuple):
    """A call of a role on a pool, from `begin_s` to `end_s` (Unix time)."""

    pool: int
    role: str
    method: str
    begin_s: float
    end_s: float

    @property
    def phase(self) -> str | None:
        """The phase of a step to which the call belongs, if any."""
        return PHASES.get(self.method) or PHASES.get(f"{self.role}.{self.method}")


class Calls:
    """Spans of a runtime's finished calls, and its calls in progress."""

    def __init__(self) -> None:
        self._ended: deque[Span] = deque(maxlen=_MOST)
        self._last_s = defaultdict[int, float](float)  # end of each pool's last call
        self._sent: weakref.WeakKeyDictionary[object, tuple[int, float]] = weakref.WeakKeyDictionary()

    def sent(self, handle: object, pool: int) -> None:
        self._sent[handle] = pool, now_s()

    def ended(self, handle: object, span: Span) -> None:
        self._sent.pop(handle, None)
        self._last_s[span.pool] = max(self._last_s[span.pool], span.end_s)
        self._ended.append(span)

    def taken(self, until_s: float) -> tuple[list[Span], list[Span]]:
        """Spans of calls that ended since the last `taken`, and of calls in progress, cut at `until_s`.

        A call in progress counts from when it was sent, or from the end of the previous call on its pool.
        """
        ended = list(self._ended)
        self._ended.clear()
        under_way = [
            Span(pool, "", "", max(sent_s, self._last_s[pool]), until_s) for pool, sent_s in self._sent.values()
        ]
        return ended, under_way


def seconds_by_phase(spans: Iterable[Span]) -> dict[str, float]:
    """`time/PHASE`: seconds of the calls of each phase, summed over pools."""
    found = defaultdict[str, float](float)
    for span in spans:
        if span.phase is not None:
            found[f"time/{span.phase}"] += span.end_s - span.begin_s
    return dict(found)


def idle_share(spans: Sequence[Span], ranks: Sequence[int], begin_s: float, end_s: float) -> dict[str, float]:
    """`sync/bubble`: the share of the ranks' time from `begin_s` to `end_s` without a call; also for each pool.

    `ranks` is the number of ranks of each pool. Calls of one pool do not overlap.
    """
    busy = [0.0] * len(ranks)
    for span in spans:
        busy[span.pool] += max(0.0, min(span.end_s, end_s) - max(span.begin_s, begin_s))
    idle = [max(0.0, 1 - each / (end_s - begin_s)) for each in busy]
    by_pool = {f"sync/bubble/pool_{index}": each for index, each in enumerate(idle)} if len(ranks) > 1 else {}
    return {"sync/bubble": sum(num * each for num, each in zip(ranks, idle, strict=True)) / sum(ranks), **by_pool}
