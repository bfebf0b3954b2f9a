"""What a roster decides next, from its state and from what its islands report. Pure: the time is an argument.

One process decides (`terrace meet`), and every decision is in its log before anybody hears of it. So no two parts of a
roster can decide differently, and that process may die at any moment: from its log it goes on where it was, and islands
report everything again that it has not written down.

Reports are whole: an island says what it holds, not what has changed. A report that is lost, repeated or late does no
harm.

Rules, in the order of `next_entry`:

- **Lost.** A member that was not heard for `patience_s`, or for a quarter of it since its connection has ended, is
  lost, with what it has in hand, provided that another member that holds the parameters is heard. If all are silent,
  it is this process that is cut off, and nobody is lost.
- **Exchange.** It begins when all that have a window in hand have trained it; or `patience_s` after the first of the
  newest window has, without those that are late. Members without a window take part, too: they are healed, or idle.
- **Commit**, if all islands of an attempt hold its sums.
- **Again.** If one of them is lost or reports a failure, there is another attempt without the lost and, if all are
  there, without the one that most others could not reach.
- **Deal.** After a commit the next window is dealt among the islands that took part in it. Those that missed it have a
  window in hand still, and bring all of it to the next exchange.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from terrace.roster.entries import (
    NO_ATTEMPT,
    Attempt,
    Attempted,
    Brought,
    Committed,
    Dealt,
    Entry,
    Finished,
    Gone,
    Joined,
    Opened,
    Terms,
)
from terrace.roster.state import Member, Roster, after


@dataclass(frozen=True, kw_only=True)
class Report:
    """What an island holds. `token` is of its process, `facts` are compared with those of the first island.

    `version` is that of its outer parameters (-1: none), `window` the one that it has in hand (-1: none), which it
    `is_ready` to exchange once trained, on `tokens` tokens. `holds` is the attempt whose sums it has. `failed` is one
    that it could not end since it did not reach the islands `blames`. An island that `leaves` goes after its exchange.
    """

    island: str
    token: str
    terms: Terms
    facts: dict[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    version: int = 0
    window: int = -1
    is_ready: bool = False
    tokens: int = 0
    holds: Attempt = NO_ATTEMPT
    failed: Attempt = NO_ATTEMPT
    blames: tuple[str, ...] = ()
    leaves: bool = False

    def __hash__(self) -> int:
        return hash((self.token, self.version, self.window, self.is_ready, self.holds, self.failed))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an island is to do. `refused` says why it cannot take part.

    `is_out`: the roster has lost it, so what it has in hand does not count, and it may join again. It is to hold
    `version`, by applying the attempt `commit`; to train `deal`; and to make the attempt `running`, among islands at
    `addresses`. `is_finished`: there is nothing more to do.
    """

    refused: str = ""
    is_out: bool = False
    is_finished: bool = False
    number: int = 0
    version: int = -1
    commit: Attempt = NO_ATTEMPT
    deal: Dealt | None = None
    running: Attempted | None = None
    addresses: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Heard:
    """The newest report of an island, when it came, and since when it is ready. `is_cut`: its connection has ended."""

    at_s: float
    report: Report | None = None
    ready_s: float = inf
    is_cut: bool = False


Ears = Mapping[str, Heard]  # by island
_FASTER = 4  # a process whose connection has ended is most likely dead: a guess


def hear(ears: Ears, report: Report, now_s: float) -> dict[str, Heard]:
    """`ears` with one more report."""
    newest_s = max((each.at_s for each in ears.values()), default=now_s)
    if now_s - newest_s > report.terms.patience_s / 2:
        # Nobody was heard: this process stood still or was cut off, and all may be there.
        ears = {name: replace(each, at_s=now_s) for name, each in ears.items()}
    before = ears.get(report.island)
    since = inf
    if report.is_ready:
        same = before is not None and before.report is not None and before.report.window == report.window
        since = min(now_s, before.ready_s) if same and before is not None else now_s
    return {**ears, report.island: Heard(now_s, report, since)}


def arrival(roster: Roster, ears: Ears, report: Report, now_s: float) -> tuple[tuple[Entry, ...], Reply | None]:
    """How a report of a process that is no member is taken: entries that make it one, or the reply that it gets."""
    if roster.terms is not None:
        if wrong := differing(roster, report):
            return (), Reply(refused=wrong)
        opening: tuple[Entry, ...] = ()
    else:
        opening = (Opened(terms=report.terms, facts=dict(report.facts)),)
    member = roster.member(report.island)
    if member is not None and member.token == report.token:
        return (), None
    if roster.is_finished:
        return (), Reply(is_finished=True, version=roster.exchange)
    if report.window >= 0 or report.version > 0 or report.leaves:
        return (), Reply(is_out=True)
    if member is not None:
        # The process before it may have died this moment. It is lost by the rule for all, and this one asks again.
        if not _is_heard(ears, member, now_s, roster) and not _can_go(roster, ears, member, now_s):
            return (), Reply(
                refused=f"island {report.island!r} was lost, and no island that is heard has the parameters: begin "
                "another roster (terrace meet with another --log) from a checkpoint (--train.weights)"
            )
        if _is_heard(ears, member, now_s, roster):
            return (), Reply(
                refused=f"island {report.island!r} is in the roster already: give every island a name of its own "
                "(--elastic.island)"
            )
        opening = (*opening, _gone(roster, member, "its process has ended"))
    if not roster.num_open_windows and roster.terms is not None:
        return (), Reply(refused="all steps of the run are dealt: nothing is left to train")
    version = 0 if report.version == 0 and not roster.exchange else -1
    new = Joined(island=report.island, token=report.token, addresses=report.addresses, version=version)
    return (*opening, new), None


def differing(roster: Roster, report: Report) -> str:
    """Why an island cannot be of this run: a fact that differs from the first island's; "" if it can."""
    if report.terms != roster.terms:
        return f"island {report.island!r} has other terms, {report.terms}, than the roster, {roster.terms}: {_SAME}"
    known = dict(roster.facts)
    other = sorted(name for name in {*known, *report.facts} if known.get(name) != report.facts.get(name))
    if other:
        return f"island {report.island!r} has another {other[0]} than the islands of the roster: {_SAME}"
    return ""


_SAME = "start it with the command of the others, or another roster (terrace meet)"


def reply(roster: Roster, report: Report) -> Reply:
    """What a member is to do."""
    member = roster.member(report.island)
    if member is None or member.token != report.token:
        return Reply(is_out=True)
    running = roster.running
    # An attempt may be of a process of that name before this one.
    if running is not None and (member.name not in running.islands or not _same(member, running.islands[member.name])):
        running = None
    names = () if running is None else tuple(running.islands)
    return Reply(
        is_finished=roster.is_finished,
        number=roster.number,
        version=member.version,
        commit=member.commit,
        deal=member.deal,
        running=running,
        addresses={each.name: each.addresses for each in roster.members if each.name in names},
    )


def settled(roster: Roster, ears: Ears, now_s: float, wait_for: int) -> tuple[Roster, tuple[Entry, ...]]:
    """The state after all decisions that can be taken now, and these."""
    entries: list[Entry] = []
    while (entry := next_entry(roster, ears, now_s, wait_for)) is not None:
        roster = after(roster, entry)
        entries.append(entry)
    return roster, tuple(entries)


def next_entry(roster: Roster, ears: Ears, now_s: float, wait_for: int) -> Entry | None:
    """The next decision, or None if nothing can be decided now. A run begins with `wait_for` islands."""
    if roster.terms is None or roster.is_finished:
        return None
    for member in roster.members:
        if (why := _why_gone(roster, ears, member, now_s)) and _can_go(roster, ears, member, now_s):
            return _gone(roster, member, why)
    if not roster.window:
        ready = [each.name for each in roster.members if each.version == 0 and _is_heard(ears, each, now_s, roster)]
        return _deal(roster, ready) if len(ready) >= wait_for else None
    if roster.running is not None:
        return _of_running(roster, roster.running, ears, now_s)
    if roster.owes:
        able = [each.name for each in roster.members if each.name in roster.last and not _leaves(ears, each)]
        if able and roster.num_open_windows:
            return _deal(roster, able)
    if not roster.num_open_windows and all(each.deal is None for each in roster.members):
        return Finished(version=roster.version)
    return _begun(roster, ears, now_s)


def _report(ears: Ears, member: Member) -> Report | None:
    heard = ears.get(member.name)
    return heard.report if heard is not None and heard.report and heard.report.token == member.token else None


def _is_heard(ears: Ears, member: Member, now_s: float, roster: Roster) -> bool:
    heard, terms = ears.get(member.name), roster.terms
    assert terms is not None
    if heard is None:
        return False
    # A connection may be lost alone: whoever lives connects again at once.
    return now_s - heard.at_s <= terms.patience_s / (_FASTER if heard.is_cut else 1)


def _leaves(ears: Ears, member: Member) -> bool:
    report = _report(ears, member)
    return report is not None and report.leaves


def _why_gone(roster: Roster, ears: Ears, member: Member, now_s: float) -> str:
    if not _is_heard(ears, member, now_s, roster):
        is_cut = member.name in ears and ears[member.name].is_cut
        return "its connection has ended" if is_cut else "it was not heard"
    in_it = roster.running is not None and member.name in roster.running.islands
    report = _report(ears, member)
    # Not before it has applied the exchange that it leaves after.
    is_done = report is not None and report.leaves and report.version == member.version and member.deal is None
    return "it leaves" if is_done and not in_it else ""


def _can_go(roster: Roster, ears: Ears, member: Member, now_s: float) -> bool:
    """Whether nothing is lost with it that nobody else has: another member that is heard holds the parameters."""
    if member.version < 0 or not roster.window:  # nothing that counts before the first deal
        return True
    others = (each for each in roster.members if each.name != member.name and each.version >= 0)
    return any(_is_heard(ears, each, now_s, roster) for each in others)


def _gone(roster: Roster, member: Member, why: str) -> Gone:
    terms = roster.terms
    assert terms is not None
    if member.deal is None:
        return Gone(island=member.name, token=member.token, why=why)
    deal = member.deal
    return Gone(island=member.name, token=member.token, why=why, share=member.share, first=deal.first, last=deal.last)


def _deal(roster: Roster, names: list[str]) -> Dealt:
    terms, names = roster.terms, sorted(names)
    assert terms is not None
    least, more = divmod(terms.rounds, len(names))
    shares = {name: least + (place < more) for place, name in enumerate(names)}
    steps = terms.steps_of(roster.window)
    return Dealt(
        number=roster.number + 1,
        window=roster.window,
        first=steps[0],
        last=steps[-1],
        shares={name: share for name, share in shares.items() if share},
    )


def _is_ready(ears: Ears, member: Member) -> bool:
    report = _report(ears, member)
    return member.deal is None or (report is not None and report.is_ready and report.window == member.window)


def _begun(roster: Roster, ears: Ears, now_s: float) -> Attempted | None:
    """The first attempt at the next exchange, if it is time."""
    terms = roster.terms
    assert terms is not None
    busy = [each for each in roster.members if each.deal is not None]
    newest = max((each.window for each in busy), default=-1)
    late = [each for each in busy if not _is_ready(ears, each)]
    if late:
        since = [
            ears[each.name].ready_s for each in busy if each.window == newest and each not in late and each.name in ears
        ]
        if now_s - min(since, default=inf) < terms.patience_s:
            return None
    return _attempt(roster, ears, now_s, dict.fromkeys((each.name for each in late), "it was late"))


def _attempt(roster: Roster, ears: Ears, now_s: float, missed: dict[str, str]) -> Attempted | None:
    """An attempt among all members but `missed`; None if none of them that is heard holds the newest version, or if
    they bring nothing while others still train.
    """
    silent = [each.name for each in roster.members if not _is_heard(ears, each, now_s, roster)]
    missed = dict.fromkeys(silent, "it was not heard") | missed
    members = [each for each in roster.members if each.name not in missed]
    if not any(each.version == roster.version >= 0 for each in members) or not _has_purpose(roster, members):
        return None
    islands = {}
    for each in members:
        report = _report(ears, each)
        tokens = report.tokens if report is not None and each.deal is not None else 0
        islands[each.name] = Brought(token=each.token, version=each.version, window=each.window, tokens=tokens)
    return Attempted(
        exchange=roster.exchange, attempt=roster.attempt, version=roster.version, islands=islands, missed=missed
    )


def _has_purpose(roster: Roster, members: list[Member]) -> bool:
    brings = any(each.deal is not None or each.version < roster.version for each in members)
    return brings or all(each.deal is None for each in roster.members)


def _of_running(roster: Roster, running: Attempted, ears: Ears, now_s: float) -> Entry | None:
    members = {each.name: each for each in roster.members}
    stay = [name for name, brought in running.islands.items() if name in members and _same(members[name], brought)]
    reports = {name: _report(ears, members[name]) for name in stay}
    if len(stay) == len(running.islands):
        if all(report is not None and report.holds == running.key for report in reports.values()):
            return Committed(exchange=running.exchange, attempt=running.attempt)
        if not any(report is not None and report.failed == running.key for report in reports.values()):
            return None
    late = {each.name: "it was late" for each in roster.members if not _is_ready(ears, each)}
    unreached = _unreached(roster, running, reports, set(stay)) if len(stay) == len(running.islands) else ""
    if unreached:
        late |= {unreached: "others did not reach it"}
    return _attempt(roster, ears, now_s, late)


def _same(member: Member, brought: Brought) -> bool:
    return member.token == brought.token


def _unreached(roster: Roster, running: Attempted, reports: Mapping[str, Report | None], stay: set[str]) -> str:
    """The island that most others could not reach; "" if none can be left out."""
    blamed = Counter[str]()
    for own, report in reports.items():
        if report is not None and report.failed == running.key:
            there = set(report.blames) & stay
            # Who reaches none of several others is cut off itself.
            blamed.update([own] if len(there) == len(stay) - 1 > 1 else there)
    for name, _ in sorted(blamed.items(), key=lambda each: (-each[1], running.islands[each[0]].version, each[0])):
        others = [each for each in roster.members if each.name in stay and each.name != name]
        if any(each.version == roster.version for each in others) and _has_purpose(roster, others):
            return name
    return ""


def restarted(roster: Roster, now_s: float) -> dict[str, Heard]:
    """What a process knows of its islands that has just read its log: all were there a moment ago."""
    return {each.name: Heard(now_s) for each in roster.members}


def cut(ears: Ears, island: str, token: str) -> dict[str, Heard]:
    """`ears` after the connection of an island's process has ended."""
    heard = ears.get(island)
    if heard is None or heard.report is None or heard.report.token != token:
        return dict(ears)
    return {**ears, island: replace(heard, is_cut=True)}
