"""The rule that names the culprit, on made-up heartbeats."""

from typing import Any

import pytest

from terrace.launch.postmortem import Diagnosis, Heartbeat, compress, decode, diagnose, expand
from tests.support.effort import lines_run


def beats(*rows: dict[str, Any], number: int = 1) -> list[Heartbeat]:
    return [
        Heartbeat(**{"number": number, "state": "waiting", "group": "", "text": "REDUCE b0", **row, "rank": rank})
        for rank, row in enumerate(rows)
    ]


def look(*rows: dict[str, Any]) -> Diagnosis:
    """Diagnose ranks that all beat between the two readings, and do not move."""
    return diagnose(beats(*rows), beats(*rows, number=2), 2.0)


ALL = "0-3"
AHEAD = {"step": 7, "counter": 5, "group": ALL, "text": "REDUCE b2"}


def test_runs_of_ranks() -> None:
    assert compress([7, 0, 1, 2, 4, 5, 5]) == "0-2, 4-5, 7"
    assert expand("0-2, 4-5, 7") == {0, 1, 2, 4, 5, 7}
    assert compress([]) == ""
    assert expand("") == frozenset()


def test_a_beat_survives_the_store() -> None:
    beat = Heartbeat(number=3, step=7, counter=41, text="REDUCE b2 m0", state="waiting", group="0-7", rank=3)
    assert decode(3, beat.encode().encode()) == beat
    assert decode(5, None).state == "absent"


def test_a_silent_rank_comes_before_one_with_an_error() -> None:
    before = beats(AHEAD, {"state": "computing", "step": 6, "counter": 1}, {"state": "failed"}, AHEAD)
    after = [before[1] if beat.rank == 1 else beat for beat in beats(*map(vars, before), number=2)]
    after = [Heartbeat(**{**vars(beat), "number": 1 if beat.rank == 1 else 2}) for beat in after]
    verdict = diagnose(before, after, 2.0)
    assert verdict.rule == "silent"
    assert verdict.message == (
        "rank 1 stopped at or before step 7, instruction 5 `REDUCE b2` (no heartbeat for 2.0 s: the process "
        "is gone or frozen; last heard at step 6, instruction 1 `REDUCE b0`); waiting for it: ranks 0, 3 "
        "(rank 0 at step 7, instruction 5 `REDUCE b2`)"
    )


def test_a_rank_that_never_came() -> None:
    rows = beats(AHEAD, AHEAD, AHEAD), beats(AHEAD, AHEAD, AHEAD, number=2)
    verdict = diagnose([*rows[0], decode(3, None)], [*rows[1], decode(3, None)], 2.0)
    assert verdict.message.startswith("rank 3 never reached its first step")
    assert "waiting for it: ranks 0-2" in verdict.message


def test_a_rank_that_left_for_its_own_reason_is_named_with_it() -> None:
    dragged = {**AHEAD, "state": "dragged", "reason": "RuntimeError: Connection closed by peer"}
    verdict = look(dragged, AHEAD, {"state": "failed", "reason": "OutOfMemoryError: 3 GB", "step": 7}, AHEAD)
    assert verdict.rule == "failed"
    assert verdict.message.startswith("rank 2 left at step 7, instruction 0 `REDUCE b0` (OutOfMemoryError: 3 GB)")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("computing", "rank 1 has not moved for 9.5 s from step 7, instruction 5 `FORWARD b1` (computing,"),
        ("idle", "rank 1 has not moved for 9.5 s from step 7, instruction 5 `FORWARD b1` (outside a step"),
        ("left", "rank 1 had finished after step 7, instruction 5 `FORWARD b1`"),
    ],
)
def test_the_rank_that_waits_for_nobody_is_behind(state: str, words: str) -> None:
    slow = {"state": state, "step": 7, "counter": 5, "text": "FORWARD b1", "still_s": 9.5}
    ahead = {"state": "computing", "step": 7, "counter": 6}
    verdict = look(AHEAD, slow, ahead, {**AHEAD, "group": "2-3"})
    assert verdict.rule == "behind"
    assert verdict.message.startswith(words)
    assert verdict.message.endswith("and 1 more behind them")


def test_when_all_wait_those_furthest_behind_are_named() -> None:
    verdict = look(AHEAD, {**AHEAD, "counter": 4}, AHEAD, AHEAD)
    assert verdict.message.startswith(
        "rank 1 is furthest behind, at step 7, instruction 4 `REDUCE b2`, itself waiting for ranks 0, 2-3"
    )


def test_when_nobody_stands_out_the_positions_are_listed() -> None:
    verdict = look(AHEAD, AHEAD, AHEAD, {**AHEAD, "text": "GATHER b2"})
    assert verdict.rule == "nobody"
    assert verdict.message.endswith(
        "ranks 0-2 at step 7, instruction 5 `REDUCE b2`; rank 3 at step 7, instruction 5 `GATHER b2`"
    )


def test_four_thousand_ranks_are_looked_at_with_little_effort() -> None:
    rows: list[dict[str, Any]] = [{**AHEAD, "group": compress(range(rank % 8, 4000, 8))} for rank in range(4000)]
    rows[1234] = {"state": "computing", "step": 7, "counter": 5}
    message = look(*rows).message
    assert lines_run(lambda: look(*rows)) < 100 * 4000
    assert message.startswith("rank 1234 has not moved")
    assert "... (499 in all)" in message
    assert len(message) < 500
