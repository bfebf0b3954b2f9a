"""A roster's state as a fold over its log. No torch, no sockets, no clock.

Whatever is not in the log (reports of islands, and when they arrived) is in `terrace.roster.decisions`, and may be lost
at any time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from terrace.roster.entries import (
    NO_ATTEMPT,
    Attempt,
    Attempted,
    Committed,
    Dealt,
    Entry,
    Finished,
    Gone,
    Joined,
    Opened,
    Terms,
)

UNREACHED = "others did not reach it"  # why an island was left out of an attempt, or was lost


@dataclass(frozen=True)
class Member:
    """An island of the roster. `version` is what it holds once it has applied `commit`; -1: it waits to be healed."""

    name: str
    token: str
    addresses: tuple[str, ...] = ()
    version: int = -1
    commit: Attempt = NO_ATTEMPT
    deal: Dealt | None = None  # in hand
    num_unreached: int = 0  # times that it was left out for that, since it took part in an exchange

    @property
    def window(self) -> int:
        """The window that it has in hand; -1 if none."""
        return -1 if self.deal is None else self.deal.window

    @property
    def share(self) -> int:
        """Rounds that it trains in each step of that window."""
        return 0 if self.deal is None else self.deal.shares[self.name]


@dataclass(frozen=True)
class Roster:
    """`members` are sorted by name. `window`, `exchange` and `attempt` are the numbers of the next ones.

    `running` is the attempt that is under way. `owes`: an exchange was committed, and the next window is not yet dealt
    among its islands, `last`.
    """

    terms: Terms | None = None
    facts: tuple[tuple[str, str], ...] = ()
    members: tuple[Member, ...] = ()
    number: int = 0
    window: int = 0
    exchange: int = 0
    attempt: int = 0
    running: Attempted | None = None
    owes: bool = False
    last: tuple[str, ...] = ()
    is_finished: bool = False
    unreached: tuple[str, ...] = ()  # addresses of islands that were lost for that

    def member(self, name: str) -> Member | None:
        return next((each for each in self.members if each.name == name), None)

    @property
    def version(self) -> int:
        """The newest version that a member holds; -1 if none holds any."""
        return max((each.version for each in self.members), default=-1)

    @property
    def num_open_windows(self) -> int:
        """Windows that are not dealt yet."""
        return 0 if self.terms is None else self.terms.num_windows - self.window


def after(roster: Roster, entry: Entry) -> Roster:
    """The state after one more entry."""
    match entry:
        case Opened():
            return replace(roster, terms=entry.terms, facts=tuple(sorted(entry.facts.items())))
        case Joined():
            new = Member(entry.island, entry.token, tuple(entry.addresses), entry.version)
            others = (each for each in roster.members if each.name != entry.island)
            return replace(roster, members=tuple(sorted((*others, new), key=lambda each: each.name)))
        case Dealt():
            dealt = tuple(replace(each, deal=entry) if each.name in entry.shares else each for each in roster.members)
            return replace(roster, members=dealt, number=entry.number, window=entry.window + 1, owes=False)
        case Attempted():
            return replace(roster, members=_missed(roster, entry), running=entry, attempt=entry.attempt + 1)
        case Committed():
            return _committed(roster, entry)
        case Gone():
            return _without(roster, entry)
        case Finished():
            return replace(roster, is_finished=True)


def _missed(roster: Roster, entry: Attempted) -> tuple[Member, ...]:
    return tuple(
        replace(each, num_unreached=each.num_unreached + 1) if entry.missed.get(each.name) == UNREACHED else each
        for each in roster.members
    )


def _without(roster: Roster, entry: Gone) -> Roster:
    member = roster.member(entry.island)
    closed = member.addresses if member is not None and entry.why == UNREACHED else ()
    others = tuple(each for each in roster.members if each.name != entry.island)
    return replace(roster, members=others, unreached=(*roster.unreached, *closed))


def _committed(roster: Roster, entry: Committed) -> Roster:
    running, key = roster.running, Attempt(entry.exchange, entry.attempt)
    assert running is not None, "only an attempt under way is committed"
    assert running.key == key, f"{key} is committed, and {running.key} is under way"
    members = tuple(
        replace(each, version=running.result, commit=key, deal=None, num_unreached=0)
        if each.name in running.islands
        else each
        for each in roster.members
    )
    return replace(
        roster,
        members=members,
        exchange=entry.exchange + 1,
        attempt=0,
        running=None,
        owes=True,
        last=tuple(running.islands),
    )


def folded(entries: Iterable[Entry]) -> Roster:
    """The state after a whole log."""
    roster = Roster()
    for entry in entries:
        roster = after(roster, entry)
    return roster
