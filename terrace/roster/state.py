"""A roster's state as a fold over its log. No torch, no sockets, no clock.

Whatever is not in the log (reports of islands, and when they arrived) is in `terrace.roster.decisions`, and may be lost
at any time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from terrace.base.errors import ConfigError
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


def folded(entries: Iterable[Entry], log: str = "the log") -> Roster:
    """The state after a whole log. Raises `ConfigError`, which names `log` and the line, for a line that cannot be."""
    roster = Roster()
    for number, entry in enumerate(entries, 1):
        if wrong := _wrong_next(roster, entry):
            raise ConfigError(
                f"line {number} of {log} does not follow from those before it ({wrong}): give the log as terrace meet "
                "has written it"
            )
        roster = after(roster, entry)
    return roster


def _wrong_next(roster: Roster, entry: Entry) -> str:
    """Why an entry cannot come next; "" if it can."""
    terms, members = roster.terms, {each.name: each for each in roster.members}
    if isinstance(entry, Opened):
        return "" if terms is None else "the run has begun already"
    if terms is None:
        return "no run has begun"
    match entry:
        case Joined():
            return f"island {entry.island!r} is in the roster already" if entry.island in members else ""
        case Dealt():
            steps = terms.steps_of(roster.window)
            is_next = (entry.window, entry.first, entry.last) == (roster.window, steps.start, steps.stop - 1)
            is_whole = entry.shares.keys() <= members.keys() and sum(entry.shares.values()) == terms.rounds
            return "" if is_next and is_whole else f"window {roster.window} is to be dealt, among {_names(members)}"
        case Attempted():
            brought = {name: (each.token, each.version, each.window) for name, each in entry.islands.items()}
            there = {name: (each.token, each.version, each.window) for name, each in members.items()}
            is_next = entry.key == Attempt(roster.exchange, roster.attempt) and entry.version <= roster.version
            other = next((name for name, own in brought.items() if there.get(name) != own), "")
            wrong = f"island {other!r} cannot bring window {entry.islands[other].window}" if other else ""
            return wrong if is_next else f"exchange {roster.exchange}, attempt {roster.attempt}, is next"
        case Committed():
            key = Attempt(entry.exchange, entry.attempt)
            is_running = roster.running is not None and roster.running.key == key
            return "" if is_running else f"exchange {key.exchange}, attempt {key.attempt}, is not under way"
        case Gone():
            is_there = entry.island in members and members[entry.island].token == entry.token
            return "" if is_there else f"island {entry.island!r} is not in the roster"
        case Finished():
            return ""


def _names(members: Iterable[str]) -> str:
    return ", ".join(members) or "no island"
