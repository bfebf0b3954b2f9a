"""Calls that ranks have not answered yet. Each rank runs its calls in order, and the running one has a deadline."""

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
    """A call that was sent. It keeps its argument rows alive until all ranks have answered."""

    name: str
    handle: Handle
    given: Sequence[Handle]


@dataclass(kw_only=True, eq=False)
class Pending:
    """The pending calls of one rank; the first has been running since `since_s` (`time.monotonic`)."""

    pool: int
    rank: int
    calls: deque[Sent] = field(default_factory=deque)
    since_s: float = 0.0

    def add(self, sent: Sent) -> None:
        self.since_s = self.since_s if self.calls else time.monotonic()
        self.calls.append(sent)

    def take(self, answer: Answer) -> None:
        """Record the answer to the first call and pass it to its handle."""
        self.calls.popleft().handle.take_answer(self.rank, answer)
        self.since_s = time.monotonic()


def checked(timeout_s: float) -> float:
    """Return `timeout_s`; raises `ConfigError` unless it is above 0."""
    if not timeout_s > 0:
        raise ConfigError(f"timeout_s = {timeout_s:g}: a call needs more than 0 seconds")
    return timeout_s


def seconds_left(busy: Iterable[Pending], timeout_s: float) -> float:
    """Seconds until the earliest deadline of ranks with pending calls."""
    return min(each.since_s for each in busy) + timeout_s - time.monotonic()


def overdue(busy: Iterable[Pending], timeout_s: float) -> tuple[list[Pending], str]:
    """The ranks of the first pool with a missed deadline, if any, and a message that names them."""
    limit_s = time.monotonic() - timeout_s
    at_work = [each for each in busy if each.calls]
    first = next((each for each in at_work if each.since_s <= limit_s), None)
    if first is None:
        return [], ""
    # Ranks receive a call one after another, so the call's other ranks would be late a moment later.
    late = [each for each in at_work if each.pool == first.pool and each.calls[0] is first.calls[0]]
    who = in_words(each.rank for each in late)
    return late, f"{late[0].calls[0].name}: {who} did not answer within {timeout_s:g} s"


def in_progress(roles: Collection[str], ranks: Iterable[Pending]) -> str:
    """A message that names the calls which the ranks of a pool are running."""
    names = dict.fromkeys(each.calls[0].name for each in ranks if each.calls)
    hosted = f"the pool of {', '.join(roles)}" if roles else "a new pool"
    return f"{hosted} was running {' and '.join(names)}" if names else f"{hosted} was idle"
