"""Calls that ranks have not answered yet: one after the other by rank, with a deadline for the one that runs."""

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

from terrace.base.errors import ConfigError
from terrace.launch.postmortem import in_words
from terrace.rl.calls.host import Answer
from terrace.rl.calls.runtime import Handle


@dataclass(frozen=True, eq=False)
class Sent:
    """A call, kept with the rows that it was given until all ranks have answered."""

    name: str
    handle: Handle
    given: Sequence[Handle]


@dataclass(kw_only=True, eq=False)
class Pending:
    """The calls of one rank, the first of which runs since `since_s`."""

    pool: int
    rank: int
    calls: deque[Sent] = field(default_factory=deque)
    since_s: float = 0.0

    def add(self, sent: Sent) -> None:
        """A call has been sent."""
        self.since_s = self.since_s if self.calls else time.monotonic()
        self.calls.append(sent)

    def take(self, answer: Answer) -> None:
        """The first call has been answered."""
        self.calls.popleft().handle.take_answer(self.rank, answer)
        self.since_s = time.monotonic()


def checked(timeout_s: float) -> float:
    """A deadline of calls; raises `ConfigError` unless it is above 0."""
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s:g}: a call needs more than 0 seconds")
    return timeout_s


def seconds_left(busy: Iterable[Pending], timeout_s: float) -> float:
    """Seconds to the first deadline of ranks that run calls."""
    return min(each.since_s for each in busy) + timeout_s - time.monotonic()


def overdue(busy: Iterable[Pending], timeout_s: float) -> tuple[list[Pending], str]:
    """The ranks of one pool that have not answered in time, if any, and the same in words."""
    limit_s = time.monotonic() - timeout_s
    at_work = [each for each in busy if each.calls]
    first = next((each for each in at_work if each.since_s <= limit_s), None)
    if first is None:
        return [], ""
    # A call reaches ranks one after the other, so that of its other ranks is late in a moment.
    late = [each for each in at_work if each.pool == first.pool and each.calls[0] is first.calls[0]]
    who = in_words(each.rank for each in late)
    return late, f"{late[0].calls[0].name}: {who} did not answer within {timeout_s:g} s"


def in_progress(roles: Collection[str], ranks: Iterable[Pending]) -> str:
    """The calls that the ranks of a pool run, in words."""
    names = dict.fromkeys(each.calls[0].name for each in ranks if each.calls)
    hosted = f"the pool of {', '.join(roles)}" if roles else "a new pool"
    return f"{hosted} was running {' and '.join(names)}" if names else f"{hosted} was idle"
