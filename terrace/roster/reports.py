"""What islands report to the meeting place, when it was heard, and what they are told. Pure.

A report is the whole state of an island, not a difference from the report before. One that is lost, repeated or late
does no harm.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf

from terrace.roster.entries import NO_ATTEMPT, Attempt, Attempted, Dealt, Terms
from terrace.roster.state import Roster


@dataclass(frozen=True, kw_only=True)
class Report:
    """The state of an island. `token` identifies its process; `facts` must equal those of the first island.

    `version` is that of its outer parameters (-1: none), `window` the window in hand (-1: none). `is_ready`: that
    window is trained, on `tokens` tokens. `holds` is the attempt whose sums it has. `failed` is an attempt that failed
    here because it did not reach the islands `blames`. `leaves`: it leaves the roster after its next exchange.
    `trained` is the last window that its process has trained (-1: none).
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
    trained: int = -1

    def __hash__(self) -> int:
        return hash((self.token, self.version, self.window, self.is_ready, self.holds, self.failed))


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What an island is to do. `refused` says why it cannot take part.

    `is_out`: the roster has counted it as lost, so it drops the window in hand, and may join again. Else it comes to
    `version` by applying the attempt `commit`, trains the window of `deal`, and makes the attempt `running` with the
    islands at `addresses`. `is_finished`: the run is over.
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
class Contact:
    """The newest report of an island, its arrival `at_s`, and the time `ready_s` since which it is ready to exchange.

    `is_cut`: its connection has ended.
    """

    at_s: float
    report: Report | None = None
    ready_s: float = inf
    is_cut: bool = False


Contacts = Mapping[str, Contact]  # by island


def with_report(contacts: Contacts, report: Report, now_s: float) -> dict[str, Contact]:
    newest_s = max((each.at_s for each in contacts.values()), default=now_s)
    if now_s - newest_s > report.terms.patience_s / 2:
        # No island was heard: this process was suspended or cut off, and all of them may still run.
        contacts = {name: replace(each, at_s=now_s) for name, each in contacts.items()}
    before = contacts.get(report.island)
    since = inf
    if report.is_ready:
        same = before is not None and before.report is not None and before.report.window == report.window
        since = min(now_s, before.ready_s) if same and before is not None else now_s
    return {**contacts, report.island: Contact(now_s, report, since)}


def restarted(roster: Roster, now_s: float) -> dict[str, Contact]:
    """The contacts of a process that has just read its log: every member counts as heard now."""
    return {each.name: Contact(now_s) for each in roster.members}


def cut(contacts: Contacts, island: str, token: str) -> dict[str, Contact]:
    """`contacts` after the connection of an island's process has ended."""
    heard = contacts.get(island)
    if heard is None or heard.report is None or heard.report.token != token:
        return dict(contacts)
    return {**contacts, island: replace(heard, is_cut=True)}
