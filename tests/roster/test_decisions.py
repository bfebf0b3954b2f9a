"""Decisions one at a time, with times: who is refused, who is lost and when, what is dealt, what the log holds."""

from dataclasses import replace

import pytest

from terrace.base.errors import ConfigError
from terrace.roster.decisions import arrival, forsaken, reply, settled
from terrace.roster.entries import (
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
    entry_of,
    line_of,
)
from terrace.roster.reports import Contact, Reply, Report, cut, restarted, with_report
from terrace.roster.side import Act, Side
from terrace.roster.state import Roster, after, folded

TERMS = Terms(every=10, steps=25, rounds=7, patience_s=4.0)


class Desk:
    """A meeting place without a socket: reports go in, replies come out, decisions are kept."""

    def __init__(self, wait_for: int = 2, terms: Terms = TERMS) -> None:
        self.roster, self.contacts, self.log = Roster(), dict[str, Contact](), list[Entry]()
        self.wait_for, self.terms = wait_for, terms

    def take(self, *entries: Entry) -> None:
        for entry in entries:
            self.roster = after(self.roster, entry)
            self.log.append(entry)

    def tick(self, now_s: float) -> None:
        self.take(*settled(self.roster, self.contacts, now_s, self.wait_for)[1])

    def report(self, name: str, now_s: float = 0.0, **more: object) -> Reply:
        report = replace(Report(island=name, token=f"{name}0", terms=self.terms, facts={"model": "m"}), **more)  # type: ignore[arg-type]
        entries, answer = arrival(self.roster, self.contacts, report, now_s)
        self.take(*entries)
        if answer is not None:
            return answer
        self.contacts = with_report(self.contacts, report, now_s)
        self.tick(now_s)
        return forsaken(self.roster, self.contacts, report, now_s) or reply(self.roster, report)

    def of(self, kind: type[Entry]) -> list[Entry]:
        return [entry for entry in self.log if isinstance(entry, kind)]


def two_islands() -> Desk:
    desk = Desk()
    desk.report("a")
    desk.report("b")
    return desk


def test_a_window_is_dealt_when_enough_islands_have_come() -> None:
    desk = Desk()
    assert desk.report("a").deal is None
    assert desk.report("b").deal == Dealt(number=1, window=0, first=0, last=9, shares={"a": 4, "b": 3})


def test_an_exchange_is_committed_when_all_hold_its_sums_and_the_next_window_is_dealt() -> None:
    desk = two_islands()
    assert desk.report("a", window=0, is_ready=True, tokens=40).running is None
    running = desk.report("b", window=0, is_ready=True, tokens=30).running
    assert running is not None
    assert [each.tokens for each in running.islands.values()] == [40, 30]
    ready = {"window": 0, "is_ready": True}
    assert desk.report("a", **ready, holds=running.key).commit == Attempt(-1, -1)
    answer = desk.report("b", **ready, holds=running.key)
    assert (answer.commit, answer.version) == (running.key, 1)
    assert answer.deal is not None
    assert (answer.deal.first, answer.deal.last) == (10, 19)


def test_the_last_window_is_shorter_and_the_run_is_finished_after_it() -> None:
    desk = Desk(wait_for=1)
    answer, version = desk.report("a"), 0
    while not answer.is_finished:
        assert answer.deal is not None
        ready = {"window": answer.deal.window, "is_ready": True, "version": version}
        running = desk.report("a", **ready).running
        assert running is not None
        answer, version = desk.report("a", **ready, holds=running.key), version + 1
        if answer.deal is not None:
            assert answer.deal.last in (19, 24)
    assert desk.of(Finished) == [Finished(version=3)]


def test_an_island_that_is_late_misses_the_exchange_and_has_no_share_of_the_next_window() -> None:
    desk = two_islands()
    desk.report("a", 1.0, window=0, is_ready=True)
    desk.report("b", 4.0, window=0)
    assert desk.report("a", 4.9, window=0, is_ready=True).running is None
    running = desk.report("a", 5.0, window=0, is_ready=True).running
    assert running is not None
    assert running.missed == {"b": "it was late"}
    desk.report("a", 5.1, window=0, is_ready=True, holds=running.key)
    assert desk.of(Dealt)[-1] == Dealt(number=2, window=1, first=10, last=19, shares={"a": 7})
    # Whoever is late has the older anchor, and is healed when it brings its change.
    desk.report("b", 6.0, window=0, is_ready=True, tokens=5)
    running = desk.report("a", 6.1, version=1, window=1, is_ready=True, tokens=7).running
    assert running is not None
    assert running.version == 1
    assert {name: (each.version, each.window) for name, each in running.islands.items()} == {"a": (1, 1), "b": (0, 0)}


def test_a_lost_island_is_counted_with_its_share_and_steps_and_the_attempt_is_made_again() -> None:
    desk = two_islands()
    desk.report("a", window=0, is_ready=True)
    first = desk.report("b", window=0, is_ready=True).running
    assert first is not None
    for now_s in (1.0, 2.0, 3.0, 4.0):
        assert desk.report("a", now_s, window=0, is_ready=True, holds=first.key).running == first
    again = desk.report("a", 4.2, window=0, is_ready=True, holds=first.key).running
    assert desk.of(Gone) == [Gone(island="b", token="b0", why="it sent no report in time", share=3, first=0, last=9)]
    assert again is not None
    assert (again.key, [*again.islands]) == (Attempt(0, 1), ["a"])
    # The frozen one wakes: what it had does not count, and it may join again, to be healed.
    assert desk.report("b", 9.0, window=0, is_ready=True).is_out
    desk.report("b", 9.1, token="b1", version=-1)
    assert desk.of(Joined)[-1] == Joined(island="b", token="b1", addresses=(), version=-1)


def test_an_island_whose_connection_ends_is_lost_unless_it_connects_again() -> None:
    desk = two_islands()
    desk.contacts = cut(desk.contacts, "b", "b0")
    desk.report("a", 0.9)
    desk.report("b", 0.95)
    desk.report("a", 1.5)
    assert not desk.of(Gone)
    desk.contacts = cut(desk.contacts, "b", "b0")
    desk.report("a", 2.0)
    assert [(entry.island, entry.why) for entry in desk.of(Gone)] == [("b", "its connection has ended")]  # type: ignore[union-attr]


def test_nobody_is_lost_where_all_are_silent_or_where_nobody_else_holds_the_anchor() -> None:
    desk = two_islands()
    desk.tick(100.0)
    desk.report("a", 100.1)
    desk.report("b", 101.0)
    assert not desk.of(Gone)
    alone = Desk(wait_for=1)
    alone.report("a")
    running = alone.report("a", window=0, is_ready=True).running
    assert running is not None
    alone.report("a", window=0, is_ready=True, holds=running.key)
    alone.contacts = cut(alone.contacts, "a", "a0")
    alone.report("c", 0.5)
    alone.report("c", 50.0)
    assert not alone.of(Gone)
    assert alone.report("c", 51.0).deal is None


def test_who_is_blamed_most_is_left_out_and_keeps_its_window() -> None:
    desk = Desk(wait_for=3)
    for name in "abc":
        desk.report(name)
    ready = {"window": 0, "is_ready": True}
    running = [desk.report(name, **ready).running for name in "abc"][-1]
    assert running is not None
    again = desk.report("b", **ready, failed=running.key, blames=("a",)).running
    assert again is not None
    assert (again.missed, [*again.islands]) == ({"a": "others did not reach it"}, ["b", "c"])
    assert desk.report("a", **ready).deal is not None


def test_an_island_that_leaves_goes_after_its_exchange() -> None:
    desk = two_islands()
    ready = {"window": 0, "is_ready": True}
    desk.report("a", **ready)
    running = desk.report("b", **ready, leaves=True).running
    assert running is not None
    desk.report("a", **ready, holds=running.key)
    desk.report("b", **ready, holds=running.key, leaves=True)
    assert desk.of(Dealt)[-1].shares == {"a": 7}  # type: ignore[union-attr]
    # Reported in the background before it has applied the exchange.
    assert not desk.report("b", **ready, holds=running.key, leaves=True).is_out
    assert desk.report("b", version=1, leaves=True).is_out
    assert desk.of(Gone) == [Gone(island="b", token="b0", why="it was asked to stop")]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"token": "another"}, "island 'b' is in the roster already"),
        ({"facts": {"model": "other"}, "island": "c"}, "another model than the islands of the roster"),
        ({"facts": {"model": "m", "seed": "7", "initial value": "7"}, "island": "c"}, "another seed than"),
        ({"facts": {"model": "m", "initial value": "7"}, "island": "c"}, "another initial value than"),
        ({"terms": replace(TERMS, every=5), "island": "c"}, "has other terms"),
    ],
)
def test_who_cannot_take_part_is_refused_in_one_line(more: dict[str, object], words: str) -> None:
    desk = two_islands()
    refused = desk.report("b", 0.0, **more).refused
    assert words in refused
    assert "\n" not in refused


def test_a_process_takes_the_place_of_one_of_its_name_whose_connection_has_ended() -> None:
    desk = two_islands()
    desk.contacts = cut(desk.contacts, "b", "b0")
    assert desk.report("b", 0.9, token="b1").refused
    desk.report("a", 1.0)
    desk.report("b", 1.1, token="b1")
    assert [type(entry) for entry in desk.log[-2:]] == [Gone, Joined]
    assert desk.roster.member("b") is not None


def test_a_joiner_comes_too_late_for_the_last_window() -> None:
    desk = Desk(wait_for=1, terms=replace(TERMS, steps=10))
    desk.report("a")
    assert "all steps of the run are dealt" in desk.report("b").refused


def test_more_islands_than_rounds_leave_some_without_a_share() -> None:
    desk = Desk(wait_for=3, terms=replace(TERMS, rounds=2))
    for name in "abc":
        desk.report(name)
    assert desk.of(Dealt)[-1].shares == {"a": 1, "b": 1}  # type: ignore[union-attr]
    ready = {"window": 0, "is_ready": True}
    running = [desk.report(name, **ready).running for name in "ab"][-1]
    assert running is not None
    assert [each.window for each in running.islands.values()] == [0, 0, -1]


def test_the_log_holds_all_that_was_promised() -> None:
    desk = two_islands()
    ready = {"window": 0, "is_ready": True, "tokens": 3}
    desk.report("a", **ready)
    running = desk.report("b", **ready).running
    assert running is not None
    desk.report("a", **ready, holds=running.key)
    again = folded(entry_of(line_of(entry), "a line") for entry in desk.log)
    assert again == desk.roster
    # Back from its log, it hears once more that all hold the sums.
    back = Desk()
    back.roster, back.log, back.contacts = again, list(desk.log), restarted(again, 50.0)
    back.report("b", 50.1, **ready, holds=running.key)
    assert not back.of(Committed)
    back.report("a", 50.2, **ready, holds=running.key)
    assert back.of(Committed) == [Committed(exchange=0, attempt=0)]
    assert not back.of(Gone)


@pytest.mark.parametrize("line", ["", "{", "[]", '{"kind": "stolen"}', '{"kind": "committed", "exchange": 1}'])
def test_a_line_that_is_no_entry_is_refused(line: str) -> None:
    with pytest.raises(ConfigError, match="line 3"):
        entry_of(line, "roster.jsonl, line 3")


def test_every_kind_of_entry_comes_back_from_its_line() -> None:
    entries: list[Entry] = [
        Opened(terms=TERMS, facts={"model": "m"}),
        Joined(island="a", token="t", addresses=("h:1",), version=0),
        Dealt(number=1, window=0, first=0, last=9, shares={"a": 7}),
        Attempted(exchange=0, attempt=1, version=0, islands={}, missed={"b": "it was late"}),
        Committed(exchange=0, attempt=1),
        Gone(island="a", token="t", why="it was asked to stop"),
        Finished(version=3),
    ]
    assert [entry_of(line_of(entry), "a line") for entry in entries] == entries


def test_the_last_island_that_had_the_parameters_does_not_come_back_without_them() -> None:
    """A new process of its name is told so, not that its name is taken."""
    desk = two_islands()
    late_s = 2 * TERMS.patience_s + 1
    refused = desk.report("a", now_s=late_s, token="another").refused
    assert "island 'a' was lost, and no island that still reports has the parameters" in refused
    assert not desk.of(Gone)


def test_a_newcomer_waits_six_times_the_patience_for_an_island_that_could_heal_it() -> None:
    desk = two_islands()
    for name in "ab":
        running = desk.report(name, window=0, is_ready=True, tokens=40).running
    assert running is not None
    for name in "ab":
        desk.report(name, window=0, is_ready=True, holds=running.key)
    now_s = 0.0
    while now_s < 6 * TERMS.patience_s - 1:
        now_s += 1.0
        assert not desk.report("c", now_s, version=-1 if now_s > 1 else 0).refused
    refused = [desk.report("c", now_s + more, version=-1).refused for more in (1.0, 2.0, 3.0)]
    assert "without a report of an island that has the parameters (a, b): begin another roster" in refused[-1]
    # One that comes back heals it.
    desk.report("a", now_s + 4.0, window=1, version=1)
    assert not desk.report("c", now_s + 4.1, version=-1).refused


def test_an_island_that_the_roster_has_finished_without_does_not_end_as_if_it_had_the_result() -> None:
    finished = Reply(is_finished=True, version=3)
    assert Side(version=3).follow(finished)[1] is Act.END
    assert Side(version=2).follow(finished)[1] is Act.LATE
    assert Side(version=-1).follow(replace(finished, version=-1))[1] is Act.LATE


def unreached(desk: Desk, exchange: int, version: dict[str, int]) -> None:
    """Islands a and c do not reach b in an exchange, nor b them."""
    ready = {name: {"version": version[name], "window": exchange, "is_ready": True} for name in "abc"}
    ready["b"]["window"] = 0
    for name in "abc":
        running = desk.report(name, **ready[name], tokens=1).running
    assert running is not None
    for name, blames in {"a": ("b",), "b": ("a", "c"), "c": ("b",)}.items():
        desk.report(name, **ready[name], failed=running.key, blames=blames)


def test_an_island_that_others_do_not_reach_twice_is_lost_and_told_why() -> None:
    desk = Desk(wait_for=3)
    for name in "abc":
        desk.report(name, addresses=(f"{name}|1",))
    unreached(desk, 0, {"a": 0, "b": 0, "c": 0})
    (_, again) = desk.of(Attempted)
    assert isinstance(again, Attempted)
    assert (list(again.islands), again.missed) == (["a", "c"], {"b": "others did not reach it"})
    for name in "ac":
        desk.report(name, version=0, window=0, is_ready=True, holds=again.key)
    unreached(desk, 1, {"a": 1, "b": 0, "c": 1})
    (gone,) = desk.of(Gone)
    assert isinstance(gone, Gone)
    assert (gone.island, gone.why, gone.share, gone.first) == ("b", "others did not reach it", 2, 0)
    assert desk.report("b", version=0, window=0).is_out
    refused = desk.report("b", token="b1", version=-1, addresses=("b|1",)).refused
    assert refused == "other islands did not reach island 'b' at b|1: open its ports to them, and start it again"
    assert not desk.report("b", token="b2", version=-1, addresses=("b|2",)).refused
    assert folded(desk.log) == desk.roster


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (0, r"line 1 of here does not follow from those before it \(no run has begun\): give the log as terrace meet"),
        (1, r"line 3 of here .*\(window 0 is to be dealt, among b\)"),
        (3, r"line 4 of here .*\(island 'a' cannot bring window 0\)"),
        (4, r"line 5 of here .*\(exchange 0, attempt 0, is not under way\)"),
    ],
)
def test_a_log_that_lacks_a_line_is_refused_at_the_first_that_does_not_follow(place: int, words: str) -> None:
    desk = two_islands()
    for name in ("a", "b"):
        desk.report(name, version=0, window=0, is_ready=True, tokens=5)
    for name in ("a", "b"):
        desk.report(name, version=0, window=0, is_ready=True, tokens=5, holds=Attempt(0, 0))
    kinds = [type(entry) for entry in desk.log[:6]]
    assert kinds == [Opened, Joined, Joined, Dealt, Attempted, Committed]
    assert folded(desk.log, "here") == desk.roster
    with pytest.raises(ConfigError, match=words):
        folded([*desk.log[:place], *desk.log[place + 1 :]], "here")
    joined, gone = desk.log[1], Gone(island="a", token="of an earlier process", why="it")
    with pytest.raises(ConfigError, match=r"line 4 of here .*\(island 'a' is in the roster already\)"):
        folded([*desk.log[:3], joined], "here")
    with pytest.raises(ConfigError, match=r"line 4 of here .*\(island 'a' is not in the roster\)"):
        folded([*desk.log[:3], gone], "here")
