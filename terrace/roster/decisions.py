"""What a roster decides next, from its state and from what its islands report. Pure: the time is an argument.

One process decides (`terrace meet`), and writes every decision to its log before any island receives it. So two parts
of a roster cannot decide differently. That process may die at any time: started again, it reads its log, and islands
report again whatever is not in it.

Rules, in the order of `next_entry`:

- **Lost.** A member is lost, with the window that it has in hand, if no report of it arrives for `patience_s`, or for a
  quarter of that once its connection has ended, while another member that holds the parameters still reports. If all
  are silent, this process is cut off, and no member is lost.
- **Exchange.** It begins when all members with a window in hand have trained it; or `patience_s` after the first member
  has trained the newest window, without the members that are late. Members without a window take part too: they bring
  no change, and are healed if their version is older.
- **Commit.** An attempt is committed when all of its islands hold its sums.
- **Again.** If one of them is lost or reports a failure, another attempt follows without the lost islands. If none is
  lost, it leaves out the island that most others could not reach. One that is to be left out a second time before it
  has taken part in an exchange is lost, since every exchange would wait for it.
- **Deal.** After a commit the next window is dealt among the islands that took part in it. Islands that missed it still
  have a window in hand, and bring all of it to the next exchange.
"""

from collections import Counter
from collections.abc import Mapping
from math import inf

from terrace.roster.entries import Attempted, Brought, Committed, Dealt, Entry, Finished, Gone, Joined, Opened
from terrace.roster.reports import Contacts, Reply, Report
from terrace.roster.state import UNREACHED, Member, Roster, after

_RETURN = 6  # times the patience in which an island that is silent may come back to heal newcomers: a guess
_TRIES = 2  # attempts with an island that others do not reach, where they have nothing to exchange without it
_FASTER = 4  # divides the patience once a connection has ended, since its process is most likely dead: a guess


def arrival(roster: Roster, contacts: Contacts, report: Report, now_s: float) -> tuple[tuple[Entry, ...], Reply | None]:
    """Admit the process of a report, if it is no member yet. Returns the entries that do so, or a refusing reply."""
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
        # The earlier process of that name may just have died. It is lost by the rule for all, and this one asks again.
        if not _is_heard(contacts, member, now_s, roster) and not _can_go(roster, contacts, member, now_s):
            why = f"island {report.island!r} was lost, and no island that still reports has the parameters"
            return (), Reply(refused=f"{why}: {_ANOTHER}")
        if _is_heard(contacts, member, now_s, roster):
            return (), Reply(
                refused=f"island {report.island!r} is in the roster already: give every island a name of its own "
                "(--elastic.island)"
            )
        opening = (*opening, _gone(roster, member, "its process has ended"))
    if known := set(report.addresses) & set(roster.unreached):
        return (), Reply(
            refused=f"other islands did not reach island {report.island!r} at {', '.join(sorted(known))}: open its "
            "ports to them, and start it again"
        )
    if not roster.num_open_windows and roster.terms is not None:
        return (), Reply(refused="all steps of the run are dealt: nothing is left to train")
    version = 0 if report.version == 0 and not roster.exchange else -1
    new = Joined(
        island=report.island, token=report.token, addresses=report.addresses, version=version, trained=report.trained
    )
    return (*opening, new), None


def differing(roster: Roster, report: Report) -> str:
    """Why an island cannot join this run: its terms or a fact differ from the first island's; "" if it can."""
    if report.terms != roster.terms:
        return f"island {report.island!r} has other terms, {report.terms}, than the roster, {roster.terms}: {_SAME}"
    known = dict(roster.facts)
    other = [name for name in {*known, *report.facts} if known.get(name) != report.facts.get(name)]
    other.sort(key=lambda name: (name == INITIAL_VALUE, name))  # which follows from others, such as the seed
    if other:
        return f"island {report.island!r} has another {other[0]} than the islands of the roster: {_SAME}"
    return ""


INITIAL_VALUE = "initial value"  # the fact that is a checksum of the initial parameters
_ANOTHER = "begin another roster (terrace meet with another --log) from a checkpoint (--train.weights)"
_SAME = "start it with the command of the others, or start another roster for it (terrace meet)"


def reply(roster: Roster, report: Report) -> Reply:
    member = roster.member(report.island)
    if member is None or member.token != report.token:
        return Reply(is_out=True)
    running = roster.running
    # The attempt may name an earlier process of this island.
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


def forsaken(roster: Roster, contacts: Contacts, report: Report, now_s: float) -> Reply | None:
    """The refusal of an island that waits to be healed while nobody has been heard who could; None for any other."""
    terms, member = roster.terms, roster.member(report.island)
    holders = [each.name for each in roster.members if each.version >= 0]
    silent_s = now_s - max((contacts[name].at_s for name in holders if name in contacts), default=now_s)
    waits = member is not None and member.version < 0 and roster.window > 0 and not roster.is_finished
    if terms is None or not waits or silent_s <= _RETURN * terms.patience_s:
        return None
    why = f"{silent_s:.0f} s without a report of an island that has the parameters ({', '.join(holders)})"
    return Reply(refused=f"{why}: {_ANOTHER}")


def settled(roster: Roster, contacts: Contacts, now_s: float, wait_for: int) -> tuple[Roster, tuple[Entry, ...]]:
    """Take all decisions that are due. Returns the state after them, and their entries."""
    entries: list[Entry] = []
    while (entry := next_entry(roster, contacts, now_s, wait_for)) is not None:
        roster = after(roster, entry)
        entries.append(entry)
    return roster, tuple(entries)


def next_entry(roster: Roster, contacts: Contacts, now_s: float, wait_for: int) -> Entry | None:
    """The next decision, or None if nothing can be decided now. A run begins with `wait_for` islands."""
    if roster.terms is None or roster.is_finished:
        return None
    for member in roster.members:
        if (why := _why_gone(roster, contacts, member, now_s)) and _can_go(roster, contacts, member, now_s):
            return _gone(roster, member, why)
    if not roster.window:
        ready = [each.name for each in roster.members if each.version == 0 and _is_heard(contacts, each, now_s, roster)]
        return _deal(roster, ready) if len(ready) >= wait_for else None
    if roster.running is not None:
        return _of_running(roster, roster.running, contacts, now_s)
    if roster.owes:
        able = [each.name for each in roster.members if each.name in roster.last and not _leaves(contacts, each)]
        if able and roster.num_open_windows:
            return _deal(roster, able)
    if not roster.num_open_windows and all(each.deal is None for each in roster.members):
        return Finished(version=roster.version)
    return _begun(roster, contacts, now_s)


def _report(contacts: Contacts, member: Member) -> Report | None:
    heard = contacts.get(member.name)
    return heard.report if heard is not None and heard.report and heard.report.token == member.token else None


def _is_heard(contacts: Contacts, member: Member, now_s: float, roster: Roster) -> bool:
    heard, terms = contacts.get(member.name), roster.terms
    assert terms is not None
    if heard is None:
        return False
    # A connection may be lost alone: whoever lives connects again at once.
    return now_s - heard.at_s <= terms.patience_s / (_FASTER if heard.is_cut else 1)


def _leaves(contacts: Contacts, member: Member) -> bool:
    report = _report(contacts, member)
    return report is not None and report.leaves


_SILENT = "it sent no report in time"


def _why_gone(roster: Roster, contacts: Contacts, member: Member, now_s: float) -> str:
    if not _is_heard(contacts, member, now_s, roster):
        is_cut = member.name in contacts and contacts[member.name].is_cut
        return "its connection has ended" if is_cut else _SILENT
    in_it = roster.running is not None and member.name in roster.running.islands
    report = _report(contacts, member)
    # It leaves only once it has applied its last exchange.
    is_done = report is not None and report.leaves and report.version == member.version and member.deal is None
    return "it was asked to stop" if is_done and not in_it else ""


def _can_go(roster: Roster, contacts: Contacts, member: Member, now_s: float) -> bool:
    """Whether the roster can go on without a member: another one that still reports holds the parameters."""
    if member.version < 0 or not roster.window:  # before the first deal there are only initial values
        return True
    others = (each for each in roster.members if each.name != member.name and each.version >= 0)
    return any(_is_heard(contacts, each, now_s, roster) for each in others)


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


def _is_ready(contacts: Contacts, member: Member) -> bool:
    report = _report(contacts, member)
    return member.deal is None or (report is not None and report.is_ready and report.window == member.window)


def _begun(roster: Roster, contacts: Contacts, now_s: float) -> Attempted | None:
    terms = roster.terms
    assert terms is not None
    busy = [each for each in roster.members if each.deal is not None]
    newest = max((each.window for each in busy), default=-1)
    late = [each for each in busy if not _is_ready(contacts, each)]
    if late:
        since = [
            contacts[each.name].ready_s
            for each in busy
            if each.window == newest and each not in late and each.name in contacts
        ]
        if now_s - min(since, default=inf) < terms.patience_s:
            return None
    return _attempt(roster, contacts, now_s, dict.fromkeys((each.name for each in late), "it was late"))


def _attempt(roster: Roster, contacts: Contacts, now_s: float, missed: dict[str, str]) -> Attempted | None:
    """An attempt among all members that report, but `missed`. None if none of these holds the newest version, or if
    they have nothing to exchange while others still train.
    """
    silent = [each.name for each in roster.members if not _is_heard(contacts, each, now_s, roster)]
    missed = dict.fromkeys(silent, _SILENT) | missed
    members = [each for each in roster.members if each.name not in missed]
    if not any(each.version == roster.version >= 0 for each in members) or not _has_purpose(roster, members):
        return None
    islands = {}
    for each in members:
        report = _report(contacts, each)
        tokens = report.tokens if report is not None and each.deal is not None else 0
        islands[each.name] = Brought(token=each.token, version=each.version, window=each.window, tokens=tokens)
    return Attempted(
        exchange=roster.exchange, attempt=roster.attempt, version=roster.version, islands=islands, missed=missed
    )


def _has_purpose(roster: Roster, members: list[Member]) -> bool:
    brings = any(each.deal is not None or each.version < roster.version for each in members)
    return brings or all(each.deal is None for each in roster.members)


def _of_running(roster: Roster, running: Attempted, contacts: Contacts, now_s: float) -> Entry | None:
    members = {each.name: each for each in roster.members}
    stay = [name for name, brought in running.islands.items() if name in members and _same(members[name], brought)]
    reports = {name: _report(contacts, members[name]) for name in stay}
    if len(stay) == len(running.islands):
        if all(report is not None and report.holds == running.key for report in reports.values()):
            return Committed(exchange=running.exchange, attempt=running.attempt)
        if not any(report is not None and report.failed == running.key for report in reports.values()):
            return None
    late = {each.name: "it was late" for each in roster.members if not _is_ready(contacts, each)}
    unreached = _unreached(roster, running, reports, set(stay)) if len(stay) == len(running.islands) else ""
    if unreached:
        others = [members[name] for name in stay if name != unreached]
        # Nobody else has anything to bring, so that the attempt cannot be made without it.
        is_needed = not _has_purpose(roster, others)
        if members[unreached].num_unreached or (is_needed and running.attempt >= _TRIES):
            return _gone(roster, members[unreached], UNREACHED)
        late |= {} if is_needed else {unreached: UNREACHED}
    return _attempt(roster, contacts, now_s, late)


def _same(member: Member, brought: Brought) -> bool:
    return member.token == brought.token


def _unreached(roster: Roster, running: Attempted, reports: Mapping[str, Report | None], stay: set[str]) -> str:
    """The island that most others could not reach, if possible one without which they have something to exchange.

    "" if no other holds the newest version.
    """
    blamed = Counter[str]()
    for own, report in reports.items():
        if report is not None and report.failed == running.key:
            there = set(report.blames) & stay
            # An island that reaches none of several others is cut off itself.
            blamed.update([own] if len(there) == len(stay) - 1 > 1 else there)
    ranked = sorted(blamed, key=lambda name: (-blamed[name], running.islands[name].version, name))
    others = {name: [each for each in roster.members if each.name in stay and each.name != name] for name in ranked}
    able = [name for name in ranked if any(each.version == roster.version for each in others[name])]
    return next((name for name in able if _has_purpose(roster, others[name])), next(iter(able), ""))
