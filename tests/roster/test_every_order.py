"""The roster played through every order of reports, losses, failures and restarts, for a few islands and exchanges.

The player below knows nothing of the log or of patience: at every moment any island may report (and its reply be lost),
train, end an attempt or fail at it, be killed, be taken for lost, or be told that it is late; and the deciding process
may be restarted from its log. All states that can be reached are visited once.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from terrace.roster import decisions
from terrace.roster.decisions import arrival, reply, settled
from terrace.roster.entries import Attempted, Brought, Committed, Dealt, Entry, Gone, Terms
from terrace.roster.reports import Contact, Contacts, Report, restarted, with_report
from terrace.roster.side import Act, Side
from terrace.roster.state import UNREACHED, Roster, after
from tests.support.nightly import nightly

pytestmark = pytest.mark.timeout(1200)  # 800,000 states take minutes

PATIENCE_S = 1.0
NEVER_S = -100.0  # heard, or ready, long ago
MOST_ATTEMPTS = 2  # at which an island that is dead is not yet taken for lost


@dataclass(frozen=True)
class Island:
    """A process: its side, and what its parameters are made of, as the exchanges in order with who brought what."""

    name: str
    life: int = 0
    side: Side = field(default_factory=Side)
    content: tuple[object, ...] = ()
    sums: object = None
    is_alive: bool = True
    is_joined: bool = False
    taken_for_lost: bool = False

    @property
    def token(self) -> str:
        return f"{self.name}{self.life}"


@dataclass(frozen=True)
class Played:
    """A moment: islands, the roster and what it has heard, its log as far as it is checked, and the faults left."""

    islands: tuple[Island, ...]
    roster: Roster = field(default_factory=Roster)
    contacts: tuple[tuple[str, Contact], ...] = ()
    merged: tuple[tuple[int, str], ...] = ()  # windows that an exchange has taken, or that were lost, by island
    contents: tuple[object, ...] = ((),)  # of every version
    faults: int = 0


def terms(windows: int) -> Terms:
    return Terms(every=2, steps=2 * windows, rounds=4, patience_s=PATIENCE_S)


def report_of(island: Island, run: Terms) -> Report:
    side = island.side
    return Report(
        island=island.name,
        token=island.token,
        terms=run,
        version=side.version,
        window=side.window,
        is_ready=side.is_trained,
        tokens=1,
        holds=side.holds,
        failed=side.failed,
        blames=side.blames,
    )


def noted(played: Played, entries: tuple[Entry, ...]) -> Played:
    """Check entries as they are decided: every window is taken or lost once, every commit is of an attempt of all."""
    merged, contents, roster = list(played.merged), list(played.contents), played.roster
    islands = played.islands
    for entry in entries:
        if isinstance(entry, Committed):
            running = roster.running
            assert running is not None
            taken = [(each.window, name) for name, each in running.islands.items() if each.window >= 0]
            assert not set(taken) & set(merged), "no window is taken twice"
            assert all(brought.version <= running.version for brought in running.islands.values())
            merged += taken
            base = contents[running.version]
            assert isinstance(base, tuple)
            assert len(contents) == running.result
            contents.append((*base, summed(running.islands)))
        if isinstance(entry, Gone) and entry.first >= 0:
            lost = (entry.first // 2, entry.island)
            assert lost not in merged, "what an exchange has taken is not lost"
            merged.append(lost)
        if isinstance(entry, Gone) and entry.why == UNREACHED:
            islands = tuple(
                replace(each, taken_for_lost=True) if each.token == entry.token else each for each in islands
            )
        if isinstance(entry, Dealt):
            assert sum(entry.shares.values()) == 4, "the whole batch is dealt"
        roster = after(roster, entry)
    return replace(played, islands=islands, merged=tuple(merged), contents=tuple(contents), roster=roster)


def summed(islands: dict[str, Brought]) -> object:
    return tuple(sorted((name, each.window) for name, each in islands.items()))


def decided(played: Played, contacts: dict[str, Contact], wait_for: int) -> Played:
    roster, entries = settled(played.roster, contacts, 0.0, wait_for)
    found = noted(played, entries)
    assert found.roster == roster
    return replace(found, contacts=tuple(sorted(contacts.items())))


def reported(played: Played, place: int, run: Terms, wait_for: int, *, is_heard: bool) -> Played | None:
    """Island `place` reports; its reply is lost unless `is_heard`."""
    island = played.islands[place]
    report, contacts = report_of(island, run), dict(played.contacts)
    entries, refusal = arrival(played.roster, contacts, report, 0.0)
    if refusal is not None and refusal.refused:
        return None  # it asks again later
    found = noted(played, entries)
    if refusal is None:
        found = decided(found, with_report(contacts, report, 0.0), wait_for)
        refusal = reply(found.roster, report)
    if not is_heard:
        return found
    island = found.islands[place]  # which its own report may have put out
    side, act = island.side.follow(refusal)
    new = replace(island, side=side, is_joined=True)
    if act is Act.BEGIN_AGAIN:
        assert island.taken_for_lost, "only an island that was taken for lost begins again"
        new = replace(new, life=island.life + 1, content=(), taken_for_lost=False, is_joined=False)
    if act is Act.APPLY:
        new = replace(new, content=island.sums, sums=None)  # type: ignore[arg-type]  # the content that it becomes
    if new.side.version >= 0:
        assert new.content == found.contents[new.side.version], "equal versions are equal parameters"
    return replace(found, islands=replaced(found.islands, place, new))


def replaced(islands: tuple[Island, ...], place: int, new: Island) -> tuple[Island, ...]:
    return (*islands[:place], new, *islands[place + 1 :])


def moves(played: Played, run: Terms, wait_for: int, lossy: bool) -> Iterator[tuple[str, Played]]:
    """Everything that may happen next."""
    for place, island in enumerate(played.islands):
        if not island.is_alive:
            continue

        def with_side(side: Side, place: int = place, island: Island = island, **more: object) -> Played:
            new = replace(island, side=side, **more)  # type: ignore[arg-type]
            return replace(played, islands=replaced(played.islands, place, new))

        side = island.side
        for is_heard in (True, False) if lossy else (True,):
            found = reported(played, place, run, wait_for, is_heard=is_heard)
            if found is not None:
                yield f"report {island.name}", found
        # Nobody sees that an island has trained before it reports.
        if side.deal is not None and not side.is_trained:
            found = reported(with_side(side.trained()), place, run, wait_for, is_heard=True)
            if found is not None:
                yield f"train {island.name}", found
        trying = side.trying
        if trying is not None and trying.key not in (side.holds, side.failed):
            others = [each for each in played.islands if each.name in trying.islands]
            there = [each for each in others if each.side.trying is not None and each.side.trying.key == trying.key]
            if len(there) == len(trying.islands) and all(each.is_alive for each in there):
                # Whoever holds the base can heal all; sums are of what each has brought.
                base = next(each.content for each in there if each.side.version == trying.version)
                yield f"hold {island.name}", with_side(side.held(trying.key), sums=(*base, summed(trying.islands)))
            absent = tuple(each.name for each in others if each not in there or not each.is_alive)
            # Who waits for an island that is there waits for its patience: a fault, such as a frozen island.
            is_fault = bool(absent) and all(each.is_alive for each in others)
            if absent and played.faults >= is_fault and trying.attempt < MOST_ATTEMPTS:
                failed = with_side(side.fails(trying.key, absent))
                yield f"fail {island.name}", replace(failed, faults=played.faults - is_fault)
        if played.faults:
            left = replace(played, faults=played.faults - 1)
            yield (
                f"kill {island.name}",
                replace(left, islands=replaced(left.islands, place, replace(island, is_alive=False))),
            )
            if trying is not None and trying.key not in (side.holds, side.failed):
                blamed = tuple(name for name in trying.islands if name != island.name)
                yield f"cut {island.name}", replace(with_side(side.fails(trying.key, blamed)), faults=left.faults)
    yield from _moves_of_roster(played, wait_for)


def _moves_of_roster(played: Played, wait_for: int) -> Iterator[tuple[str, Played]]:
    contacts = dict(played.contacts)
    for place, island in enumerate(played.islands):
        heard = contacts.get(island.name)
        is_fault = island.is_alive  # silence of an island that is there: a freeze, a cut
        if heard is None or heard.at_s == NEVER_S or (is_fault and not played.faults):
            continue
        if played.roster.member(island.name) is None:
            continue
        silent = decided(
            replace(played, faults=played.faults - is_fault),
            {**contacts, island.name: replace(heard, at_s=NEVER_S)},
            wait_for,
        )
        marked = replace(island, taken_for_lost=island.taken_for_lost or is_fault)
        yield f"silence {island.name}", replace(silent, islands=replaced(silent.islands, place, marked))
    late = {
        name: replace(heard, ready_s=NEVER_S) if heard.ready_s == 0.0 else heard for name, heard in contacts.items()
    }
    if late != contacts:
        yield "patience ends", decided(played, late, wait_for)
    if played.faults:
        yield "restart", decided(replace(played, faults=played.faults - 1), restarted(played.roster, 0.0), wait_for)


def is_over(played: Played) -> bool:
    """Whether the run ended as it should for all that live."""
    roster = played.roster
    return roster.is_finished and all(
        each.side.version == (roster.exchange if each.name in roster.last else member.version)
        for each in played.islands
        if each.is_alive and (member := roster.member(each.name)) and member.token == each.token
    )


def play(windows: int, faults: int, islands: str, *, lossy: bool = False) -> tuple[int, int]:
    """Visit all states; returns how many, and how many of them are ends."""
    run, wait_for = terms(windows), len(islands)
    begin = Played(islands=tuple(Island(name) for name in islands), faults=faults)
    seen, todo, ends = {begin}, [begin], 0
    while todo:
        now = todo.pop()
        onwards = {found for _, found in moves(now, run, wait_for, lossy) if found != now}
        if not onwards:
            ends += 1
            check_end(now)
        todo += onwards - seen
        seen |= onwards
    return len(seen), ends


def check_end(played: Played) -> None:
    """Nothing more can happen: the run is finished, or nobody is left who holds the parameters."""
    roster = played.roster
    holders = [each for each in played.islands if each.is_alive and each.side.version >= 0 and roster.member(each.name)]
    if not holders and roster.window:
        return
    assert is_over(played) or not roster.window, f"nothing goes on: {played}"
    if roster.window:
        assert {window for window, _ in played.merged} == set(range(roster.window)), "windows are taken or counted"


# Islands, windows, faults (deaths, freezes, failed links, restarts of the deciding process), whether replies are lost.
BY_DAY = [("abc", 1, 0, False), ("ab", 1, 1, False), ("ab", 2, 0, True)]
BY_NIGHT = [("abc", 2, 0, False), ("abc", 1, 1, False), ("ab", 2, 1, True), ("ab", 1, 2, False)]


@pytest.mark.parametrize(("islands", "windows", "faults", "lossy"), BY_DAY + nightly(*BY_NIGHT))
def test_every_order_ends_with_equal_parameters_and_no_step_lost(
    islands: str, windows: int, faults: int, lossy: bool
) -> None:
    num_states, num_ends = play(windows, faults, islands, lossy=lossy)
    assert num_states > 100
    assert num_ends > 1


@pytest.mark.parametrize("seed", range(12))
def test_random_orders_of_three_islands_with_three_faults(seed: int) -> None:
    draw, run = random.Random(seed), terms(2)
    now = Played(islands=tuple(Island(name) for name in "abc"), faults=3)
    for _ in range(400):
        onwards = [found for _, found in moves(now, run, 3, True) if found != now]
        if not onwards:
            break
        now = draw.choice(onwards)
    # From wherever it is, it ends once nothing more goes wrong: dead islands fall silent, the others go on.
    now = replace(now, faults=0)
    for _ in range(400):
        onwards = [found for _, found in moves(now, run, 3, False) if found != now]
        if not onwards:
            break
        now = draw.choice(onwards)
    else:
        raise AssertionError("it goes on for ever")
    check_end(now)


def test_the_player_notices_a_roster_that_commits_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    def early(roster: Roster, running: Attempted, contacts: Contacts, now_s: float) -> Entry | None:
        found = right(roster, running, contacts, now_s)
        held = [each for each in contacts.values() if each.report is not None and each.report.holds == running.key]
        return Committed(exchange=running.exchange, attempt=running.attempt) if held else found

    right = decisions._of_running
    monkeypatch.setattr(decisions, "_of_running", early)
    with pytest.raises(AssertionError):
        play(1, 0, "ab")


@pytest.mark.nightly
def test_the_player_notices_an_island_that_is_offered_the_attempt_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "_same", lambda member, brought: True)
    with pytest.raises((AssertionError, RuntimeError)):
        play(2, 1, "ab")
