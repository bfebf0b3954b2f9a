"""Faults that show in the logs of several ranks, and the table of rules."""

import pytest

from tests.virtual_cuda.findings import Kind
from tests.virtual_cuda.rules import RULES, Entry, Key, faults_of

ALL, FIRST = Key((0, 1, 2), 0), Key((0, 1), 0)
LAST, ENDS = Key((1, 2), 0), Key((0, 2), 0)


def make(key: Key, number: int = 1) -> Entry:
    return Entry("make", key, f"as group {number}", -1, f"make {key.ranks}")


def sums(key: Key, numel: int) -> Entry:
    return Entry("collective", key, f"allreduce_ of {numel}", -1, f"sums.py:{numel}")


def message(what: str, peer: int, numel: int) -> Entry:
    return Entry(what, FIRST, str(numel), peer, f"{what}.py:{numel}")


CASES = {
    "sums in one order": ([[sums(FIRST, 1), sums(FIRST, 2)]] * 2, None),
    "sums in two orders": ([[sums(FIRST, 1), sums(FIRST, 2)], [sums(FIRST, 2), sums(FIRST, 1)]], Kind.ORDER),
    "sums of two communicators in two orders": ([[sums(FIRST, 1), sums(ALL, 2)], [sums(ALL, 2), sums(FIRST, 1)]], None),
    "messages in one order": ([[message("send", 1, 4)], [message("receive", 0, 4)]], None),
    "messages in two orders": (
        [[message("send", 1, 4), message("send", 1, 5)], [message("receive", 0, 5), message("receive", 0, 4)]],
        Kind.ORDER,
    ),
    "groups in one order": ([[make(FIRST)], [make(FIRST), make(LAST)], [make(LAST)]], None),
    "groups in a ring": (
        [[make(FIRST), make(ENDS)], [make(LAST), make(FIRST)], [make(ENDS), make(LAST)]],
        Kind.MAKING,
    ),
    "a group under two names": ([[make(FIRST, 1)], [make(FIRST, 2)]], Kind.MAKING),
    "a receive that nothing ends": ([[Entry("stuck", FIRST, "receive", 1, "wait.py:1")], [sums(LAST, 1)]], Kind.STUCK),
}


@pytest.mark.parametrize("name", CASES)
def test_logs_of_ranks(name: str) -> None:
    logs, kind = CASES[name]
    found = faults_of(logs)
    assert {fault.kind for fault in found} == ({kind} if kind else set())
    if kind is Kind.ORDER:
        assert all(text in found[0].words for text in (".py:", "rank 0", "rank 1"))


def test_every_kind_of_messages_has_a_rule_with_a_source() -> None:
    of_messages = {
        Kind.COMMUNICATOR,
        Kind.ORDER,
        Kind.MAKING,
        Kind.LATE_MAKING,
        Kind.BOUND_WORLD,
        Kind.MEMORY,
        Kind.STUCK,
    }
    assert {rule.kind for rule in RULES} == of_messages
    assert all(rule.source and rule.words for rule in RULES)
